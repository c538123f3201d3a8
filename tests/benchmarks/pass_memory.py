"""A worker process of its own that says how far one pass raises its peak of resident memory.

The first line is {"model", and any knob of WorkerConfig}; every further one {"tokens", "length"}: a pass of sequences
of that length, so many tokens together, answered by the bytes that the peak lies above what the loaded worker had.
Passes of one process are to grow: what the allocator keeps of a large pass hides the peak of a small one.
"""

import json
import sys

import numpy as np

from ...schemas.models import LoraConfig
from ...schemas.training import Datum, ForwardBackwardRequest
from ...workers.protocol.config import ServedModel, WorkerConfig
from ...workers.protocol.verbs import Failure, Part, Pass, RunSpec
from ...workers.worker.worker import Worker
from .resident import peak_bytes, resident_bytes, restart_peak


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    worker = Worker(WorkerConfig(ServedModel("measured", setup.pop("model")), device="cpu", **setup))
    worker.create_run(RunSpec("run", LoraConfig(rank=8, seed=0, train_unembed=False)))
    _run_pass(worker, tokens=64, length=64)  # whatever is made once, at the first pass
    loaded = resident_bytes()
    restart_peak()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        _run_pass(worker, **json.loads(line))
        print(peak_bytes() - loaded, flush=True)


def _run_pass(worker: Worker, tokens: int, length: int) -> None:
    vocab = worker.info().vocab_size
    random = np.random.default_rng(0)
    data = []
    for _ in range(tokens // length):
        row = random.integers(0, vocab, length + 1)
        weights = (np.arange(length) >= length // 3).astype(np.float32)  # after a prompt
        data.append(Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weights}))
    request = ForwardBackwardRequest("run", 1, tuple(data), "cross_entropy")
    (output,) = worker.run_pass(Pass((Part(tokens, request),)))
    assert output is not None and not isinstance(output, Failure), output


if __name__ == "__main__":
    main()
