"""`make bench`: training over HTTP through the official SDK against a hand-written local loop, in one run.

Both sides train the same rank-8 adapter (attention and MLP) of the same tiny Qwen3 on the same batches. Rounds of the
two sides alternate, because the machine's speed drifts; ratios are medians over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from ..live import live_server
from ..tiny import tiny_model
from .empty_operation import layers

RANK = 8
VOCAB = 4096
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "initializer_range": 0.02,
}
MODEL = "tiny/qwen3-bench"
Batches = dict[str, list[list[int]]]


def batches() -> Batches:
    """Name -> token rows; a row of n + 1 tokens trains n positions."""
    random = np.random.default_rng(0)

    def rows(lengths: list[int]) -> list[list[int]]:
        return [random.integers(3, VOCAB, length + 1).tolist() for length in lengths]

    return {
        "16x128": rows([128] * 16),
        "4x512": rows([512] * 4),
        "16 of 8..512": rows([int(length) for length in np.exp(random.uniform(np.log(8), np.log(512), 16))]),
    }


def num_tokens(rows: list[list[int]]) -> int:
    return sum(len(row) - 1 for row in rows)


def datum(row: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(row[1:], dtype=np.int64)),
            "weights": types.TensorData.from_numpy(np.ones(len(row) - 1, dtype=np.float32)),
        },
    )


@contextmanager
def local_loop(model: Path, data: Batches, threads: int) -> Iterator[Callable[[str, int], float]]:
    """Yields run(batch name, steps) -> seconds, in a process of its own that waits silently in between."""
    child = subprocess.Popen(
        [sys.executable, "-m", "trainhouse.tests.benchmarks.local_loop"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    stdin, stdout = child.stdin, child.stdout

    def ask(line: str) -> str:
        stdin.write(line + "\n")
        stdin.flush()
        return stdout.readline()

    try:
        ask(json.dumps({"threads": threads, "rank": RANK, "model": str(model), "batches": data}))
        yield lambda name, steps: float(ask(f"{name.replace(' ', '_')} {steps}"))
    finally:
        stdin.close()
        child.wait(timeout=30)


class RemoteLoop:
    """The same work through the official SDK: a step's two submits, and those of the next, before its results."""

    def __init__(self, url: str, data: Batches) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        self.data = {name: [datum(row) for row in rows] for name, rows in data.items()}
        self.client = self.service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)

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


def compare(local: Callable[[str, int], float], remote: RemoteLoop, data: Batches, rounds: int) -> list[dict]:
    table = []
    for name, rows in data.items():
        steps = 8
        local(name, 2), remote.train(name, 2)
        pairs = [(local(name, steps), remote.train(name, steps)) for _ in range(rounds)]
        tokens = steps * num_tokens(rows)
        print(
            f"{name}: {[(round(tokens / a), round(tokens / b)) for a, b in pairs]} tokens/s, local and remote",
            flush=True,
        )
        table.append(
            {
                "batch": name,
                "local_tokens_per_second": round(tokens / statistics.median(pair[0] for pair in pairs)),
                "remote_tokens_per_second": round(tokens / statistics.median(pair[1] for pair in pairs)),
                "ratio": round(statistics.median(pair[0] / pair[1] for pair in pairs), 2),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", choices=["local", "ray"], default="local")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    data = batches()
    underscored = {name.replace(" ", "_"): rows for name, rows in data.items()}
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        with (
            local_loop(model, underscored, os.cpu_count() or 1) as local,
            live_server(
                {MODEL: model}, Path(scratch) / "state", pool=options.pool, threads=os.cpu_count() or 1
            ) as server,
        ):
            remote = RemoteLoop(server.url, data)
            figures = {"training": compare(local, remote, data, options.rounds)}
            eight_tokens = datum(list(range(3, 12)))
            figures["empty_operation_milliseconds"] = layers(model, MODEL, server.url, remote.client, eight_tokens)
            remote.service.close("success")
    print(f"{'batch':<14}{'local tok/s':>12}{'remote tok/s':>14}{'ratio':>8}")
    for row in figures["training"]:
        print(
            f"{row['batch']:<14}{row['local_tokens_per_second']:>12}{row['remote_tokens_per_second']:>14}{row['ratio']:>8}"
        )
    print("empty operation (forward of one 8-token sequence), median milliseconds up to each layer:")
    print(figures["empty_operation_milliseconds"])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
