"""The weights of a rank."""

from hashlib import sha256

import numpy as np
from trainhouse.schemas.models import TrainingConfig
from trainhouse.workers.state.vectors import FORWARD_VECTORS

from .probe_worker import ProbeWorker


def digests(rank: ProbeWorker) -> dict[str, str]:
    """Returns a digest of this rank's part of each base weight."""
    own = rank.base.weights.own_parameters()
    return {name: sha256(weight.contiguous().numpy().tobytes()).hexdigest() for name, weight in own.items()}


def forward_weights(rank: ProbeWorker, run_id: str) -> dict[str, np.ndarray]:
    """Returns this rank's weights with which a model computes."""
    with rank.models.resident([run_id], FORWARD_VECTORS) as (model,):
        return {name: view.float().numpy().copy() for name, view in model.vectors.weight_views().items()}


def shapes(rank: ProbeWorker) -> dict[str, tuple[int, ...]]:
    """Returns the rank's shapes of parameters, by name. Adapted layers hold the weight that they have from the
    model."""
    return {name: tuple(parameter.shape) for name, parameter in rank.base.model.named_parameters()}


def model_size(rank: ProbeWorker, training: TrainingConfig) -> int:
    return rank.models.build(training).layout.size
