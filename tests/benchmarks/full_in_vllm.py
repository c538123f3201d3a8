"""The way of a full model's weights into a vLLM on the CPU: SmolLM2-135M, over HTTP.

Needs TRAINHOUSE_VLLM_PYTHON, a Python that has vLLM.
"""

import statistics
import time

import numpy as np
from trainhouse import AdamParams, Datum, SamplingClient, SamplingParams, ServiceClient
from trainhouse.server.cli.demo import MODEL, converted_model

from ..live import live_server
from .harness import KEY, RANK, THREADS, Rows, Section, Setup, prompts, timed
from .sampling import vllm_python

TOKENS = 256


def full_in_vllm(setup: Setup) -> Section:
    """Times the save of a full model for sampling, and the first tokens of its new weights and of the base after it."""
    model = converted_model()
    options = {"sampler": "vllm", "vllm_python": vllm_python(), "max_lora_rank": RANK, "threads": THREADS}
    seconds: dict[str, list[float]] = {"save": [], "first token of the new weights": [], "first token of the base": []}
    with (
        live_server({MODEL: model}, setup.scratch / "vllm-server", **options) as server,
        ServiceClient(server.url, KEY) as service,
    ):
        run, base = service.create_full_training_client(MODEL), service.create_sampling_client(base_model=MODEL)
        _one_token(base, prompts(1, TOKENS, 0))
        for number in range(setup.rounds):
            rows = prompts(1, TOKENS, 1 + number)
            run.forward_backward([Datum(rows[0][:-1], {"target_tokens": np.array(rows[0][1:])})], "cross_entropy")
            run.optim_step(AdamParams(learning_rate=1e-5)).result(60)
            started = time.perf_counter()
            sampler = run.save_weights_and_get_sampling_client(kind="inflight")
            seconds["save"].append(time.perf_counter() - started)
            for name, each in (("first token of the new weights", sampler), ("first token of the base", base)):
                seconds[name].append(timed(lambda each=each, rows=rows: _one_token(each, rows)))
        counts = service.get_workers().groups[f"{MODEL} (vLLM)"]
    table = [{"what": name, "s": statistics.median(each)} for name, each in seconds.items()]
    loaded = {name: counts[name] / counts["num_pushes"] for name in counts}
    table.append({"what": "of it vLLM's loading", "s": loaded["pushed_weights_milliseconds"] / 1000})
    notes = [
        f"Medians of {setup.rounds} rounds, loading the mean; {loaded['pushed_weights_bytes'] / 1e6:.0f} MB of float32",
        f"weights; prompts of {TOKENS} tokens, which are not in the prefix cache.",
    ]
    return Section("Full models in vLLM on the CPU", table, [], notes)


def _one_token(sampler: SamplingClient, rows: Rows) -> None:
    sampler.sample(rows[0], 1, SamplingParams(max_tokens=1)).result(120)
