"""A user's training script: two tenants train at once in pipelined steps, and sample their weights during training.

python -m trainhouse.tests.acceptance.training_script URL STEPS PACKAGE TRAINING. PACKAGE: tinker (the official SDK) or
trainhouse (our client). TRAINING: "lora", or "full" for full fine-tuning by the first tenant. Prints "step N" after
each step of the first tenant, and finally the results of both as JSON.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np

MODEL = "tiny/qwen3"
SEEDS = (1, 2)
"""One per tenant."""
ROW = 12
AHEAD = 2


def main(url: str, num_steps: int, package: str, training: str) -> None:
    # Keeps the tenants at the same step, so that faults hit all of them.
    in_step = Barrier(len(SEEDS))
    with ThreadPoolExecutor(len(SEEDS)) as tenants:
        module = importlib.import_module(package)
        kinds = (training, "lora")
        trained = [
            tenants.submit(train, module, url, seed, num_steps, in_step, kind)
            for seed, kind in zip(SEEDS, kinds, strict=True)
        ]
        print(json.dumps([each.result() for each in trained]), flush=True)


def train(package: Any, url: str, seed: int, num_steps: int, in_step: Barrier, training: str) -> dict[str, object]:
    adam = package.AdamParams(learning_rate=1e-2 if training == "lora" else 1e-3)
    with package.ServiceClient(base_url=url, api_key=f"tml-tenant{seed}") as service:
        if training == "full":
            client = resolved(service.create_full_training_client(MODEL))
        else:
            client = resolved(service.create_lora_training_client(MODEL, rank=4, seed=seed))
        losses, pending, sampler, early = [], [], None, []
        for step in range(num_steps):
            in_step.wait(240)
            data = list(batch(package, 1000 * seed + step))
            pending.append((client.forward_backward(data, "cross_entropy"), client.optim_step(adam)))
            if len(pending) > AHEAD:
                losses.append(loss_of(*pending.pop(0)))
            if seed == SEEDS[0]:
                print(f"step {step}", flush=True)
            if step == num_steps // 3:
                sampler = resolved(client.save_weights_and_get_sampling_client())
                early = sample(package, sampler)
        losses += [loss_of(*each) for each in pending]
        path = client.save_state("end").result(120).path
        return {"losses": losses, "early": early, "late": sample(package, sampler), "path": path}


def resolved(client: Any) -> Any:
    """Waits for the SDK's future; our client returns the object itself."""
    return client.result(240) if hasattr(client, "result") else client


def batch(package: Any, seed: int) -> Iterator[Any]:
    for row in np.random.default_rng(seed).integers(3, 500, (2, ROW + 1)).tolist():
        inputs = {"target_tokens": row[1:], "weights": [1.0] * ROW}
        yield package.Datum(model_input=package.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


def loss_of(forward_backward: Any, optim_step: Any) -> float:
    loss = forward_backward.result(240).metrics["loss:sum"]
    optim_step.result(240)
    return loss


def sample(package: Any, sampler: Any) -> list[float]:
    """Returns log-probabilities of two samples."""
    params = package.SamplingParams(max_tokens=8, seed=5, temperature=1.0)
    response = sampler.sample(package.ModelInput.from_ints([5, 6, 7]), 2, params).result(240)
    return [float(logprob) for sequence in response.sequences for logprob in sequence.logprobs]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
