"""A worker whose drafts see nothing after the tokens of their own rank."""

from dataclasses import replace
from typing import Any

import torch
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3Network, Eagle3Pass
from trainhouse.workers.drafts.sequences.features import DraftInputs
from trainhouse.workers.worker.worker import Worker

SHORT_SIGHTED = "trainhouse.tests.workers.parallel.short_sighted_worker:ShortSightedWorker"

_training_pass = Eagle3Network.training_pass


class ShortSightedWorker(Worker):
    def load(self, address: str) -> None:
        super().load(address)
        Eagle3Network.training_pass = _short_sighted


def _short_sighted(network: Eagle3Network, inputs: DraftInputs, *others: Any) -> Eagle3Pass:
    num_own = len(inputs.positions[inputs.shard.own])
    rows = torch.arange(len(inputs.embedded)).clamp(max=max(0, num_own - 1))
    return _training_pass(network, replace(inputs, embedded=inputs.embedded[rows]), *others)
