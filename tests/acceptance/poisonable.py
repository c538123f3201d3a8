"""`trainhouse serve` whose workers die of each pass with a certain token, or in which one rank refuses another token.

Run with python -m.
"""

import os
import sys
from dataclasses import replace
from unittest import mock

from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.server.__main__ import main
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.workers.batch.micro_batch import MicroBatch
from trainhouse.workers.dispatch import DispatchConfig
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.parallel.token_shard import TokenShard
from trainhouse.workers.protocol.calls import Failure, Pass
from trainhouse.workers.worker.worker import Worker

POISONABLE = "trainhouse.tests.acceptance.poisonable"
POISON, REFUSED = 501, 502
"""Training scripts use only tokens below 500."""


class PoisonableWorker(Worker):
    def run_pass(self, parts: Pass) -> tuple[ForwardBackwardOutput | Failure | None, ...]:
        if _has(parts, POISON):
            os._exit(1)
        return super().run_pass(parts)

    def _load(self, mesh: Mesh) -> None:
        """The rank that has the token refuses it during the pass, while the other ranks continue."""
        super()._load(mesh)
        run = self._base.shared_hidden_states

        def refusing(
            micro_batch: MicroBatch, share: TokenShard | None, captured: dict[int, Tensor] | None = None
        ) -> Tensor:
            if REFUSED in micro_batch.tokens:
                raise OperationError("refused on one rank")
            return run(micro_batch, share, captured)

        self._base.shared_hidden_states = refusing


def _has(parts: Pass, token: int) -> bool:
    return any(token in datum.tokens for part in parts for datum in part.request.data)


def dispatch_config(config: ServerConfig, original=ServerConfig.dispatch_config) -> DispatchConfig:
    return replace(original(config), worker=f"{POISONABLE}:{PoisonableWorker.__name__}")


if __name__ == "__main__":
    with mock.patch.object(ServerConfig, "dispatch_config", dispatch_config):
        sys.exit(main())
