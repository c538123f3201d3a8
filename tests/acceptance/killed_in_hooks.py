"""`trainhouse serve` that is killed, or whose worker is, inside what follows an optimizer step, or while a model is
unloaded: at an armed point.

A test arms a point by a file with two words: where, and who dies. The file is gone when the process dies. Run with
python -m.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trainhouse.server.__main__ import main
from trainhouse.server.checkpoints.checkpoint_files import CheckpointFiles
from trainhouse.server.checkpoints.checkpoints import Checkpoints
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.runs.run import Run
from trainhouse.server.store import CheckpointRecord
from trainhouse.workers.dispatch import DispatchConfig
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.worker.worker import Worker

KILLED_IN_HOOKS = "trainhouse.tests.acceptance.killed_in_hooks"
ARMED, SERVER = "TRAINHOUSE_TESTS_ARMED", "TRAINHOUSE_TESTS_SERVER"
"""Variables of the environment: the file's path, and the server's process id."""


def pass_point(point: str) -> None:
    """Kills, without a chance to clean up, if this point is armed."""
    armed = Path(os.environ[ARMED])
    words = armed.read_text().split() if armed.exists() else [""]
    if words[0] == point:
        armed.unlink()
        os.kill(int(os.environ[SERVER]) if words[1] == "server" else os.getpid(), signal.SIGKILL)


class KilledWorker(Worker):
    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        super().save_run(run_id, directory, optimizer)
        pass_point("save")

    def _load(self, mesh: Mesh) -> None:
        super()._load(mesh)
        run = self._base.shared_hidden_states

        def passing(*arguments: Any) -> Tensor:
            hidden = run(*arguments)
            if not torch.is_grad_enabled():  # the pass of an evaluation, whose losses are not known yet
                pass_point("evaluation")
            return hidden

        self._base.shared_hidden_states = passing


async def publish(self: CheckpointFiles, *arguments: Any, original=CheckpointFiles.publish) -> int:
    num_bytes = await original(self, *arguments)
    pass_point("publication")  # the files are in place, and the row is missing
    return num_bytes


async def delete(self: Checkpoints, record: CheckpointRecord, original=Checkpoints.delete) -> None:
    pass_point("before-deletion")
    await original(self, record)
    pass_point("deletion")


async def end(self: Run, reason: str, original=Run.end) -> None:
    pass_point("before-end")
    await original(self, reason)
    pass_point("end")


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return replace(original(config), worker=f"{KILLED_IN_HOOKS}:{KilledWorker.__name__}")


if __name__ == "__main__":
    os.environ[SERVER] = str(os.getpid())
    with (
        mock.patch.object(ServerConfig, "dispatch_config", dispatch_config),
        mock.patch.object(CheckpointFiles, "publish", publish),
        mock.patch.object(Checkpoints, "delete", delete),
        mock.patch.object(Run, "end", end),
    ):
        sys.exit(main())
