"""Seeds: those that a request omits are drawn at submit and journaled with it, so that a replay repeats them."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ...schemas.training import ForwardBackwardRequest

T = TypeVar("T")

_SEED_LIMIT = 1 << 31
_SEED = "seed"
_SEEDED_LOSSES = {"dflash"}


def draw_seed() -> int:
    return secrets.randbelow(_SEED_LIMIT)


def draw_missing_seeds(operation: object) -> dict[str, int]:
    """Returns the seeds that the operation's loss needs and its config lacks."""
    if not isinstance(operation, ForwardBackwardRequest) or operation.loss_fn not in _SEEDED_LOSSES:
        return {}
    return {} if _SEED in operation.loss_fn_config else {_SEED: draw_seed()}


def with_drawn_seeds(operation: T, drawn: Mapping[str, int]) -> T:
    """Returns the operation with the seeds that `draw_missing_seeds` drew when it was accepted."""
    if not drawn:
        return operation
    assert isinstance(operation, ForwardBackwardRequest)
    seeds = {name: float(seed) for name, seed in drawn.items()}
    return replace(operation, loss_fn_config={**operation.loss_fn_config, **seeds})
