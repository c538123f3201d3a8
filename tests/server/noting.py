"""A worker that computes nothing and knows of each run what of it is trained; run with python -m, `trainhouse serve`
with such workers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import TrainingConfig, training_of
from trainhouse.server.__main__ import main
from trainhouse.server.config import ServerConfig
from trainhouse.workers.config import DispatchConfig, WorkerConfig
from trainhouse.workers.verbs import RunInfo, RunSpec

from ..workers.recording_worker import RecordingWorker

NOTING = "trainhouse.tests.server.noting"
TARGETS = ("layers.0.mlp",)
NO_ROOM, NO_ROOM_FOR_COPIES = -1, -2
"""Seeds of runs that cannot be created, or copied to be sampled."""

_NOTE = "training.json"


class NotingWorker(RecordingWorker):
    """What it saves of a run is what of it is trained, and into a run of another kind it loads nothing."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._runs: dict[str, TrainingConfig] = {}
        self._begun: list[int] = []

    def create_run(self, spec: RunSpec) -> RunInfo:
        if spec.training.seed == NO_ROOM:
            raise OperationError("there is no room for it")
        self._runs[spec.run_id] = spec.training
        return RunInfo(0, TARGETS)

    def drop_run(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        Path(directory, _NOTE).write_text(self._runs[run_id].model_dump_json())

    def load_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        if type(_noted(directory)) is not type(self._runs[run_id]):
            raise OperationError("it was saved by a model of another kind")

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        if self._runs[run_id].seed == NO_ROOM_FOR_COPIES:
            raise OperationError("there is no room for a copy")

    def load_adapter(self, adapter_id: str, directory: str) -> None:
        self._runs[adapter_id] = _noted(directory)

    def begin_snapshot(self, snapshot_id: int, run_id: str, directory: str, contents: str = "all") -> None:
        self.save_run(run_id, directory, optimizer=True)
        self._begun.append(snapshot_id)

    def ended_snapshots(self) -> dict[int, None]:
        begun, self._begun = self._begun, []
        return dict.fromkeys(begun)

    def memory(self) -> dict[str, int]:
        """That of each run, so to speak."""
        return dict.fromkeys(self._runs, 1)


def noting(config: DispatchConfig) -> DispatchConfig:
    return replace(config, worker=f"{NOTING}:{NotingWorker.__name__}")


def _noted(directory: str) -> TrainingConfig:
    return training_of(json.loads(Path(directory, _NOTE).read_text()))


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return noting(original(config))


if __name__ == "__main__":
    with mock.patch.object(ServerConfig, "dispatch_config", dispatch_config):
        sys.exit(main())
