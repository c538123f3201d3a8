"""Runs `trainhouse serve` with workers whose passes wait while the file $GATE exists; run it with `python -m`."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.server.__main__ import main
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.workers.dispatch import DispatchConfig
from trainhouse.workers.protocol.calls import Failure, Pass
from trainhouse.workers.worker.worker import Worker

GATED = "trainhouse.tests.server.gated"


class GatedWorker(Worker):
    def run_pass(self, parts: Pass) -> tuple[ForwardBackwardOutput | Failure | None, ...]:
        while Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
        return super().run_pass(parts)


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return replace(original(config), worker=f"{GATED}:{GatedWorker.__name__}")


if __name__ == "__main__":
    with mock.patch.object(ServerConfig, "dispatch_config", dispatch_config):
        sys.exit(main())
