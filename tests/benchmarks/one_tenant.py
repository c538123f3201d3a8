"""One tenant over HTTP, through the official SDK, against a hand-written local loop on the same batches.

The two sides take turns, because the machine's speed drifts; ratios are medians over the rounds.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import tinker
from tinker import types

from ..live import live_server
from .child import child
from .report import Line, Section
from .workload import MODEL, RANK, Rows, batches, datum, num_tokens

WANTED = {"16x128": 1.3, "4x512": 1.3, "16x(16..256)": 2.2, "16x(8..512)": 3.5}
STEPS, ROUND_SECONDS = 8, 6.0


class RemoteLoop:
    """The local loop's work through the official SDK: every submit is sent before the first result is awaited."""

    def __init__(self, service: tinker.ServiceClient, data: dict[str, Rows]) -> None:
        self.data = {name: [datum(row) for row in batch] for name, batch in data.items()}
        self.client = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)

    def train(self, name: str, num_steps: int) -> float:
        started = time.perf_counter()
        adam = types.AdamParams(learning_rate=1e-4)
        futures = []
        for _ in range(num_steps):
            futures.append(self.client.forward_backward(self.data[name], "cross_entropy"))
            futures.append(self.client.optim_step(adam))
        for future in futures:
            future.result(300)
        return time.perf_counter() - started


def one_tenant(model: Path, scratch: Path, pool: str, rounds: int) -> Section:
    data, threads = batches(), os.cpu_count() or 1
    with (
        child("local_loop") as local,
        live_server({MODEL: model}, scratch / "one-tenant", pool=pool, threads=threads) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as service,
    ):
        local.ask({"threads": threads, "rank": RANK, "model": str(model), "batches": data})
        remote = RemoteLoop(service, data)

        def local_train(name: str, num_steps: int) -> float:
            return local.ask({"batch": name, "steps": num_steps})

        table = [_compare(name, batch, local_train, remote.train, rounds) for name, batch in data.items()]
    lines = [
        Line(f"{row['batch']}, times the local loop's tokens/s", float(row["ratio"]), "at least", WANTED[row["batch"]])
        for row in table
    ]
    note = f"Medians of {rounds} rounds of up to {STEPS} steps, pipelined; the local loop pads to the longest row."
    return Section("One tenant against a hand-written local loop", table, lines, [note])


Train = Callable[[str, int], float]


def _compare(name: str, batch: Rows, local: Train, remote: Train, rounds: int) -> dict:
    remote(name, 2)
    # Fewer where a step is long, such as on a busy machine.
    steps = max(2, min(STEPS, round(2 * ROUND_SECONDS / local(name, 2))))
    pairs = [(local(name, steps), remote(name, steps)) for _ in range(rounds)]
    tokens, ratios = steps * num_tokens(batch), [mine / theirs for mine, theirs in pairs]
    return {
        "batch": name,
        "tokens": num_tokens(batch),
        "local tokens/s": round(tokens / statistics.median(mine for mine, _ in pairs)),
        "over HTTP tokens/s": round(tokens / statistics.median(theirs for _, theirs in pairs)),
        "ratio": round(statistics.median(ratios), 2),
        "lowest round": round(min(ratios), 2),
        "highest round": round(max(ratios), 2),
    }
