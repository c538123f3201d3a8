"""A worker that computes nothing. Its answers report in which of its calls the dispatch sent the work."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig, Utilization
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import Datum, ForwardBackwardOutput
from trainhouse.workers.protocol.calls import (
    Failure,
    ModelInfo,
    OperationPart,
    OptimizerStep,
    Pass,
    RunInfo,
    RunSpec,
    SamplingSlice,
    SliceResult,
)
from trainhouse.workers.protocol.worker_config import WorkerConfig

RECORDING = "trainhouse.tests.workers.recording_worker:RecordingWorker"


@dataclass
class Progress:
    """An operation whose last part has not arrived."""

    work_number: int
    data: list[Datum] = field(default_factory=list)
    num_parts: int = 0


class RecordingWorker:
    """Does what the loss_fn of an operation says: "sleep" (loss_fn_config: seconds), "refuse", "fail", "die".

    With part in loss_fn_config, only that part does so (0 is the first). Every answer has `call:last`, the number of
    calls so far; that of an operation also has its number of parts and, for the pass of the last one, its runs and
    tokens. A sample of n tokens takes n slices of its cohort. A sampling job whose name begins with "dies" kills its
    worker. A file "dies-once" in the model's directory kills the next worker right after its start.
    """

    def __init__(self, config: WorkerConfig) -> None:
        if config.model.source == "broken":
            raise ValueError("broken: no weights in this directory")
        self._config = config
        self._num_calls = 0
        self._num_slices = 0
        self._slices_left: dict[int, dict[str, int]] = {}
        self._progress: dict[str, Progress] = {}

    def info(self) -> ModelInfo:
        dies_once = Path(self._config.model.source, "dies-once")
        if dies_once.exists():
            dies_once.unlink()
            os._exit(1)
        return ModelInfo(self._config.model.name, "Recording", "float32", "cpu", 512, 1024, 0, ())

    def create_run(self, spec: RunSpec) -> RunInfo:
        self._num_calls += 1
        if isinstance(spec.training, LoraConfig) and spec.training.rank > self._config.max_lora_rank:
            raise OperationError(f"rank {spec.training.rank} is too high")
        return RunInfo(0, (), spec.training)

    def drop_run(self, run_id: str) -> None:
        self._num_calls += 1

    def clear_gradients(self, run_id: str) -> None:
        self._num_calls += 1

    def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        self._num_calls += 1

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        self._num_calls += 1

    def run_pass(self, parts: Pass) -> tuple[ForwardBackwardOutput | Failure | None, ...]:
        self._num_calls += 1
        runs = {part.request.model_id for part in parts}
        tokens = sum(len(datum.tokens) for part in parts for datum in part.request.data)
        return tuple(self._run(part, {"runs:max": len(runs), "tokens:max": tokens}) for part in parts)

    def _run(self, part: OperationPart, pass_metrics: Mapping[str, float]) -> ForwardBackwardOutput | Failure | None:
        """Returns the first token of each datum as the outputs."""
        progress = self._continue(part)
        if (failure := self._do(part, progress.num_parts - 1)) is not None:
            del self._progress[part.request.model_id]
            return failure
        if not part.last:
            return None
        del self._progress[part.request.model_id]
        outputs = tuple({"first": datum.tokens[:1].astype(np.float32)} for datum in progress.data)
        metrics = {
            "call:last": self._num_calls,
            "slices:last": self._num_slices,
            "parts:sum": progress.num_parts,
            **pass_metrics,
        }
        return ForwardBackwardOutput(outputs, metrics)

    def _continue(self, part: OperationPart) -> Progress:
        """Raises AssertionError if parts are out of order or another operation of the run is unfinished."""
        progress = self._progress.setdefault(part.request.model_id, Progress(part.work_number))
        assert progress.work_number == part.work_number, (progress.work_number, part.work_number)
        assert part.first_datum == len(progress.data), (part.first_datum, len(progress.data))
        progress.data += part.request.data
        progress.num_parts += 1
        return progress

    def _do(self, part: OperationPart, index: int) -> Failure | None:
        config = part.request.loss_fn_config
        if config.get("part", index) != index:
            return None
        match part.request.loss_fn:
            case "sleep":
                time.sleep(float(config["seconds"]))
            case "refuse":
                return Failure("refused", "user")
            case "fail":
                self._progress.clear()
                raise KeyError("unforeseen")
            case "die":
                os._exit(1)
        return None

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        self._num_calls += 1
        metrics = {"call:last": self._num_calls, "steps:last": len(steps), "optimizer_step:last": self._num_calls}
        return tuple(Failure(step.refusal_reason, "user") if step.refusal_reason else metrics for step in steps)

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        self._num_slices += 1
        time.sleep(work.budget_milliseconds / 1000)
        left = self._slices_left.pop(work.cohort, {})
        for job_id in work.cancel:
            left.pop(job_id, None)
        left |= {job.job_id: job.params.max_tokens or 1 for job in work.join}
        if any(job_id.startswith("dies") for job_id in left):
            os._exit(1)
        if any(job.adapter_id == "fails" for job in work.join):
            self._slices_left = {}
            raise KeyError("unforeseen")
        left = {job_id: number - 1 for job_id, number in left.items()}
        finished = {job_id: SampleResponse(()) for job_id, number in left.items() if number == 0}
        if left := {job_id: number for job_id, number in left.items() if number}:
            self._slices_left[work.cohort] = left
        return SliceResult(finished, len(left))

    def utilization(self) -> Utilization:
        return Utilization(peak_flops=1.0)

    def memory(self) -> dict[str, int]:
        return {"slices": self._num_slices, "sampling": sum(map(len, self._slices_left.values()))}


class RecordingGpuWorker(RecordingWorker):
    """Says that it computes micro-batches of 12,000 tokens on a GPU."""

    def info(self) -> ModelInfo:
        return replace(super().info(), device="cuda:0", micro_batch_tokens=12000)
