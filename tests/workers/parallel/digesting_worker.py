"""A worker that reports its weights."""

from hashlib import sha256

import numpy as np
from trainhouse.workers.state.vectors import FORWARD_VECTORS
from trainhouse.workers.worker.worker import Worker

DIGESTING = "trainhouse.tests.workers.parallel.digesting_worker:DigestingWorker"


class DigestingWorker(Worker):
    def digests(self) -> dict[str, str]:
        """Returns a digest of this rank's part of each base weight."""
        own = self._base.weights.own_parameters()
        return {name: sha256(weight.contiguous().numpy().tobytes()).hexdigest() for name, weight in own.items()}

    def draft_weights(self, run_id: str) -> dict[str, np.ndarray]:
        """Returns this rank's weights with which a draft computes."""
        with self._models.resident([run_id], FORWARD_VECTORS) as (model,):
            return {name: view.float().numpy().copy() for name, view in model.vectors.weight_views().items()}
