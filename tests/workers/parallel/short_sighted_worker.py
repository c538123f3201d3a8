"""A worker whose drafts see nothing after the tokens of their own rank."""

import torch
from torch import Tensor
from trainhouse.workers.drafts.algorithms import eagle3
from trainhouse.workers.worker.worker import Worker

SHORT_SIGHTED = "trainhouse.tests.workers.parallel.short_sighted_worker:ShortSightedWorker"

_ahead = eagle3._ahead


class ShortSightedWorker(Worker):
    def load(self, address: str) -> None:
        super().load(address)
        eagle3._ahead = _ahead_among_own


def _ahead_among_own(num_tokens: int, distance: int, device: torch.device) -> Tensor:
    return _ahead(num_tokens, distance, device).clamp_(max=num_tokens - 1)
