"""A base model under a layout in its own processes, and a training on it that records every number."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from safetensors.numpy import load_file
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.calls import (
    Failure,
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
    SliceResult,
)
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.ranks import Ranks

from .probe_worker import PROBE, probe_name

P = ParamSpec("P")
T = TypeVar("T")

RUNS = {"a": LoraConfig(rank=4, seed=11, expert_factors="shared"), "b": LoraConfig(rank=8, seed=12)}
# With a tiny eps a step is the gradient's sign, even where the gradient is only rounding noise.
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0, eps=1e-2)
HANG_SECONDS = 60.0


@dataclass
class Numbers:
    """Results of a training. gradients, weights: by name of the matrix, per step and run."""

    losses: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    weights: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    next_losses: list[float] = field(default_factory=list)


class Layout:
    """The ranks of one layout, called from synchronous tests."""

    def __init__(self, runner: asyncio.Runner, ranks: Ranks, config: WorkerConfig, scratch: Path) -> None:
        self.ranks, self.spec = ranks, config.parallel
        self.shards_activations = config.tp_activations == "sharded"
        self._runner = runner
        self._scratch = scratch
        self.hang_seconds = config.hang_seconds
        self._num_operations = 0

    def call(self, method: str, *arguments: object) -> Any:
        return self._runner.run(self.ranks.call(method, *arguments, hang_seconds=self.hang_seconds))

    def answers(self, method: str, *arguments: object) -> list[Any]:
        """Calls all ranks, and returns all their answers."""
        return self._runner.run(self.ranks.call_each(method, *arguments, hang_seconds=self.hang_seconds))

    def probe(self, function: Callable[Concatenate[Any, P], T], *arguments: P.args, **named: P.kwargs) -> list[T]:
        """Runs a function of tests on all ranks, with the ProbeWorker before the arguments; returns all results. See
        ProbeWorker.run_probe."""
        return self.answers("run_probe", probe_name(function), arguments, named)

    def run_pass(self, *requests: ForwardBackwardRequest) -> list[ForwardBackwardOutput | Failure | None]:
        parts = [OperationPart(self._new_operation(), request) for request in requests]
        return self.run_parts(*parts)

    def run_parts(self, *parts: OperationPart) -> list[ForwardBackwardOutput | Failure | None]:
        return list(self._runner.run(self.ranks.send_pass(parts, self.hang_seconds)))

    def sample(self, *jobs: SampleJob) -> dict[str, SampleResponse | Failure]:
        finished: dict[str, SampleResponse | Failure] = {}
        joining = jobs
        while len(finished) < len(jobs):
            result = self.run_slice(joining)
            finished, joining = finished | result.finished, ()
        return finished

    def run_slice(self, joining: tuple[SampleJob, ...] = (), milliseconds: float = 50.0) -> SliceResult:
        return self._runner.run(self.ranks.run_slice(SamplingSlice(joining, (), milliseconds), self.hang_seconds))

    def snapshot(self, run_id: str) -> Path:
        directory = self._new_directory()
        self.call("begin_snapshot", 1, run_id, str(directory))
        deadline = time.monotonic() + HANG_SECONDS
        while not (ended := self.call("ended_snapshots")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ended == {1: None}, ended
        return directory

    def saved(self, run_id: str) -> Path:
        directory = self._new_directory()
        self.call("save_run", run_id, str(directory), True)
        return directory

    def _new_operation(self) -> int:
        self._num_operations += 1
        return self._num_operations

    def _new_directory(self) -> Path:
        directory = self._scratch / f"{self.spec}-{self._new_operation()}"
        directory.mkdir(parents=True)
        return directory


AnyLayout = TypeVar("AnyLayout", bound=Layout)


@contextmanager
def layout(
    model: Path, spec: ParallelSpec, scratch: Path, worker: str = PROBE, kind: type[AnyLayout] = Layout, **options: Any
) -> Iterator[AnyLayout]:
    """worker: the class of its ranks."""
    options = {"threads": 1, "kv_cache_bytes": 1 << 22, "hang_seconds": HANG_SECONDS} | options
    config = WorkerConfig(ServedModel("tiny", str(model)), parallel=spec, **options)
    configs = tuple(replace(config, rank=rank) for rank in range(spec.num_ranks))
    with asyncio.Runner() as runner:
        ranks = Ranks(LocalPool(PoolSpec(worker, configs)), spec)
        runner.run(ranks.start())
        try:
            yield kind(runner, ranks, config, scratch)
        finally:
            runner.run(ranks.close())


def error(ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray) -> float:
    """Returns the largest error, relative to the largest value of `theirs`."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), np.finfo(np.float64).tiny))


def close(ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, tolerance: float = 1e-4) -> bool:
    return error(ours, theirs) <= tolerance


def distance(ours: Sequence[Sequence[float] | np.ndarray], theirs: Sequence[Sequence[float] | np.ndarray]) -> float:
    """Returns the largest absolute difference; both have the same shapes."""
    assert [np.shape(mine) for mine in ours] == [np.shape(other) for other in theirs]
    return max(float(np.abs(np.subtract(mine, other)).max()) for mine, other in zip(ours, theirs, strict=True))


def largest_error(ours: Sequence[Mapping[str, np.ndarray]], theirs: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Returns the largest error of any matrix; both have the same names and shapes."""
    assert [named.keys() for named in ours] == [named.keys() for named in theirs]
    pairs = [(mine[name], other[name]) for mine, other in zip(ours, theirs, strict=True) for name in mine]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(error(one, other) for one, other in pairs)


def some_data(seed: int, *lengths: int, vocab_size: int = 512) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    return tuple(_datum(random, length, vocab_size) for length in lengths)


def _datum(random: np.random.Generator, length: int, vocab_size: int) -> Datum:
    tokens = random.integers(3, vocab_size, length + 1)
    weights = random.uniform(0.1, 1.0, length).astype(np.float32)
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": weights})


def supervised(
    run_id: str, seed: int, *lengths: int, forward_only: bool = False, vocab_size: int = 512
) -> ForwardBackwardRequest:
    data = some_data(seed, *lengths, vocab_size=vocab_size)
    return ForwardBackwardRequest(run_id, 1, data, "cross_entropy", forward_only=forward_only)


def reinforced(run_id: str, seed: int, *lengths: int, loss_fn: str = "ppo") -> ForwardBackwardRequest:
    random = np.random.default_rng(seed)
    data = []
    for datum in some_data(seed, *lengths):
        length = len(datum.tokens)
        inputs = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": random.uniform(-7, -5, length).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
        }
        data.append(Datum(datum.tokens, inputs))
    return ForwardBackwardRequest(run_id, 1, tuple(data), loss_fn)


def train(where: Layout, num_steps: int = 3) -> Numbers:
    """Trains both runs, with two accumulations of uneven batches before each step; one batch has a single datum."""
    numbers = Numbers()
    for run_id, lora in RUNS.items():
        where.call("create_run", RunSpec(run_id, lora))
    for step in range(num_steps):
        for outputs in (
            where.run_pass(supervised("a", step, 9, 30, 17, 4, 12), reinforced("b", step, 21, 5, 8)),
            where.run_pass(supervised("a", step + 50, 11), reinforced("b", step + 50, 6, 13, 40, loss_fn="gspo")),
        ):
            for output in outputs:
                assert isinstance(output, ForwardBackwardOutput), output
                numbers.losses.append(output.metrics["loss:sum"])
                numbers.flops.append(output.metrics["model_flops:sum"])
                numbers.logprobs += [each["logprobs"] for each in output.loss_fn_outputs]
        numbers.gradients += [load_file(where.snapshot(run_id) / "window.safetensors") for run_id in RUNS]
        for metrics in where.call("apply_steps", tuple(OptimizerStep(run_id, ADAM) for run_id in RUNS)):
            assert isinstance(metrics, dict), metrics
            numbers.norms.append(metrics["unclipped_grad_l2:mean"])
        numbers.weights += [load_file(where.saved(run_id) / "adapter_model.safetensors") for run_id in RUNS]
    return numbers


def next_losses(where: Layout, run_id: str = "a") -> list[float]:
    """Returns the losses of two more steps."""
    losses = []
    for step in (7, 8):
        (output,) = where.run_pass(supervised(run_id, step, 9, 30, 17))
        assert isinstance(output, ForwardBackwardOutput), output
        losses.append(output.metrics["loss:sum"])
        (metrics,) = where.call("apply_steps", (OptimizerStep(run_id, ADAM),))
        assert isinstance(metrics, dict), metrics
    return losses


def greedy(job_id: str, adapter_id: str | None, length: int, num_tokens: int = 12) -> SampleJob:
    prompt = np.random.default_rng(length).integers(3, 512, length).astype(np.int32)
    return SampleJob(
        job_id, adapter_id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=5), (), (),
        prompt_logprobs=True,
    )  # fmt: skip
