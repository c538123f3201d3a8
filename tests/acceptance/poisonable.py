"""`trainhouse serve`, its workers dying of each pass with a certain token; to be run with python -m."""

import os
import sys
from dataclasses import replace
from unittest import mock

from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.server.__main__ import main
from trainhouse.server.config import ServerConfig
from trainhouse.workers.dispatch import DispatchConfig
from trainhouse.workers.verbs import Failure, Pass
from trainhouse.workers.worker import Worker

POISONABLE = "trainhouse.tests.acceptance.poisonable"
POISON = 501
"""Scripts use tokens below 500."""


class PoisonableWorker(Worker):
    def run_pass(self, work: Pass) -> tuple[ForwardBackwardOutput | Failure | None, ...]:
        if any(POISON in datum.tokens for part in work.parts for datum in part.request.data):
            os._exit(1)
        return super().run_pass(work)


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return replace(original(config), worker=f"{POISONABLE}:{PoisonableWorker.__name__}")


if __name__ == "__main__":
    with mock.patch.object(ServerConfig, "dispatch_config", dispatch_config):
        sys.exit(main())
