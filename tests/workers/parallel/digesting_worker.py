"""A worker that reports its weights."""

from hashlib import sha256

from trainhouse.workers.worker.worker import Worker

DIGESTING = "trainhouse.tests.workers.parallel.digesting_worker:DigestingWorker"


class DigestingWorker(Worker):
    def digests(self) -> dict[str, str]:
        """Returns a digest of this rank's part of each base weight."""
        own = self._base.own_parameters()
        return {name: sha256(weight.contiguous().numpy().tobytes()).hexdigest() for name, weight in own.items()}
