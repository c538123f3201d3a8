"""Runs `trainhouse serve` with workers that compute nothing but record what each run trains; run with `python -m`."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig, TrainingConfig, training_of
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.server.__main__ import main
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, RunInfo, RunSpec
from trainhouse.workers.protocol.worker_config import DispatchConfig, WorkerConfig

from ..workers.recording_worker import RecordingWorker

NOTING = "trainhouse.tests.server.noting"
TARGETS = ("layers.0.mlp",)
NO_ROOM, NO_ROOM_FOR_COPIES = -1, -2
"""Seeds of runs that cannot be created, or that cannot be copied for sampling."""

RESOLVED = {"num_layers": 1, "capture_layers": (0, 1, 2), "draft_vocab_size": 512, "intermediate_size": 64}
"""Values for the fields that a draft's config leaves open."""

_NOTE, _STATE = "training.json", "draft.json"


@dataclass
class DraftState:
    """The state of a draft other than its weights.

    target_seed: the seed of the target policy, or -1 for the bare base model.
    """

    target_seed: int = -1
    vocabulary: tuple[int, ...] = ()
    num_steps: int = 0
    num_loads: int = 0


class NotingWorker(RecordingWorker):
    """Saves a run's training config as its checkpoint, and refuses to load the checkpoint of another kind of run.

    Passes of drafts report the draft's state and the seed of the loss in their metrics.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._runs: dict[str, TrainingConfig] = {}
        self._drafts: dict[str, DraftState] = {}
        self._begun: list[int] = []

    def create_run(self, spec: RunSpec) -> RunInfo:
        if spec.training.seed == NO_ROOM:
            raise OperationError("there is no room for it")
        self._runs[spec.run_id] = training = _resolved(spec.training)
        if isinstance(training, DraftConfig):
            self._drafts[spec.run_id] = DraftState()
        return RunInfo(0, TARGETS, training)

    def drop_run(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        self._drafts.pop(run_id, None)

    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        Path(directory, _NOTE).write_text(self._runs[run_id].model_dump_json())

    def load_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        if type(_saved_config(directory)) is not type(self._runs[run_id]):
            raise OperationError("it was saved by a model of another kind")
        if (state := Path(directory, _STATE)).exists():
            self._drafts[run_id] = DraftState(**json.loads(state.read_text()))
            self._drafts[run_id].vocabulary = tuple(self._drafts[run_id].vocabulary)
            self._drafts[run_id].target_seed = -1  # not in snapshots
        elif run_id in self._drafts:
            self._drafts[run_id].num_loads += 1

    def set_target(self, run_id: str, directory: str | None) -> None:
        seed = -1 if directory is None else _saved_config(directory).seed
        assert seed is not None
        self._drafts[run_id].target_seed = seed

    def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        draft = self._drafts[run_id]
        if draft.num_steps:
            raise OperationError("its vocabulary is what it was before its first step")
        assert token_ids.dtype == np.int64
        draft.vocabulary = tuple(token_ids.tolist())

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        for step in steps:
            if step.run_id in self._drafts and step.refusal_reason is None:
                self._drafts[step.run_id].num_steps += 1
        return super().apply_steps(steps)

    def _run(self, part: OperationPart, pass_metrics: Mapping[str, float]) -> ForwardBackwardOutput | Failure | None:
        if (draft := self._drafts.get(part.request.model_id)) is not None:
            pass_metrics = _draft_metrics(draft, part) | dict(pass_metrics)
        return super()._run(part, pass_metrics)

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        if self._runs[run_id].seed == NO_ROOM_FOR_COPIES:
            raise OperationError("there is no room for a copy")

    def load_adapter(self, adapter_id: str, directory: str) -> None:
        self._runs[adapter_id] = _saved_config(directory)

    def begin_snapshot(self, snapshot_id: int, run_id: str, directory: str, contents: str = "all") -> None:
        self.save_run(run_id, directory, optimizer=True)
        if contents == "all" and run_id in self._drafts:
            Path(directory, _STATE).write_text(json.dumps(asdict(self._drafts[run_id])))
        self._begun.append(snapshot_id)

    def ended_snapshots(self) -> dict[int, None]:
        begun, self._begun = self._begun, []
        return dict.fromkeys(begun)

    def memory(self) -> dict[str, int]:
        """Reports one byte for each run, so that tests can see which runs the worker has."""
        return dict.fromkeys(self._runs, 1)


def with_noting_worker(config: DispatchConfig) -> DispatchConfig:
    return replace(config, worker=f"{NOTING}:{NotingWorker.__name__}")


def _resolved(training: TrainingConfig) -> TrainingConfig:
    if not isinstance(training, DraftConfig):
        return training
    if training.algorithm == "eagle3" and training.block_size is not None:
        raise OperationError("block_size is of dflash")
    return training.model_copy(update={name: getattr(training, name) or value for name, value in RESOLVED.items()})


def _draft_metrics(draft: DraftState, part: OperationPart) -> dict[str, float]:
    config = part.request.loss_fn_config
    first, *_ = draft.vocabulary or (-1,)
    return {
        "target_seed:last": draft.target_seed,
        "steps:last": draft.num_steps,
        "loads:last": draft.num_loads,
        "seed:last": float(config.get("seed", -1)),
        "objective_letters:last": len(str(config.get("objective", ""))),
        "first_token:last": first,
        "tokens_said:last": len(draft.vocabulary),
    }


def _saved_config(directory: str) -> TrainingConfig:
    return training_of(json.loads(Path(directory, _NOTE).read_text()))


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return with_noting_worker(original(config))


if __name__ == "__main__":
    with mock.patch.object(ServerConfig, "dispatch_config", dispatch_config):
        sys.exit(main())
