"""A worker that computes nothing: its answers tell in which calls the dispatch made of what it was given."""

import os
import time
from pathlib import Path

from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.config import WorkerConfig
from trainhouse.workers.verbs import Failure, ModelInfo, Pass, RunInfo, RunSpec, Slice, SliceResult, Step

RECORDING = "trainhouse.tests.workers.recording_worker:RecordingWorker"


class RecordingWorker:
    """Operations are told what to do by their loss_fn: "sleep" (loss_fn_config: seconds), "refuse", "fail", "die".

    Every answer holds `call:last`, the number of the worker's calls up to then. A sample of n tokens takes n slices.
    A file "dies-once" in the model's directory makes the next worker die as soon as it has started.
    """

    def __init__(self, config: WorkerConfig) -> None:
        if config.model.source == "broken":
            raise ValueError("broken: no weights in this directory")
        self._config = config
        self._num_calls = 0
        self._num_slices = 0
        self._slices_left: dict[str, int] = {}

    def info(self) -> ModelInfo:
        dies_once = Path(self._config.model.source, "dies-once")
        if dies_once.exists():
            dies_once.unlink()
            os._exit(1)
        return ModelInfo(self._config.model.name, "Recording", "float32", "cpu", 512, 1024, 0, ())

    def create_run(self, spec: RunSpec) -> RunInfo:
        self._num_calls += 1
        if spec.lora.rank > self._config.max_lora_rank:
            raise OperationError(f"rank {spec.lora.rank} is too high")
        return RunInfo(0, ())

    def drop_run(self, run_id: str) -> None:
        self._num_calls += 1

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        self._num_calls += 1

    def run_pass(self, work: Pass) -> tuple[ForwardBackwardOutput | Failure, ...]:
        self._num_calls += 1
        return tuple(self._run(operation.loss_fn, operation.loss_fn_config) for operation in (part.request for part in work.parts))

    def _run(self, loss_fn: str, config) -> ForwardBackwardOutput | Failure:
        match loss_fn:
            case "sleep":
                time.sleep(config["seconds"])
            case "refuse":
                return Failure("refused", "user")
            case "fail":
                raise KeyError("unforeseen")
            case "die":
                os._exit(1)
        return ForwardBackwardOutput((), {"call:last": self._num_calls, "slices:last": self._num_slices})

    def apply_steps(self, steps: tuple[Step, ...]) -> tuple[dict[str, float], ...]:
        self._num_calls += 1
        return tuple({"call:last": self._num_calls, "steps:last": len(steps)} for _ in steps)

    def sample_slice(self, work: Slice) -> SliceResult:
        self._num_slices += 1
        time.sleep(work.budget_milliseconds / 1000)
        for job_id in work.cancel:
            self._slices_left.pop(job_id, None)
        self._slices_left |= {job.job_id: job.params.max_tokens or 1 for job in work.join}
        if any(job.adapter_id == "fails" for job in work.join):
            raise KeyError("unforeseen")
        self._slices_left = {job_id: left - 1 for job_id, left in self._slices_left.items()}
        finished = {job_id: SampleResponse(()) for job_id, left in self._slices_left.items() if left == 0}
        self._slices_left = {job_id: left for job_id, left in self._slices_left.items() if left}
        return SliceResult(finished, len(self._slices_left))

    def memory(self) -> dict[str, int]:
        return {"slices": self._num_slices, "sampling": len(self._slices_left)}
