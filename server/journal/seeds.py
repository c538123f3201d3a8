"""Seeds: where a request leaves one open it is drawn, once, and what it draws is journaled with it."""

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


def draw_open_seeds(operation: object) -> dict[str, int]:
    """Of a loss that draws, where its config names no seed."""
    if not isinstance(operation, ForwardBackwardRequest) or operation.loss_fn not in _SEEDED_LOSSES:
        return {}
    return {} if _SEED in operation.loss_fn_config else {_SEED: draw_seed()}


def with_drawn(operation: T, drawn: Mapping[str, int]) -> T:
    """drawn: by draw_open_seeds, when it was accepted."""
    if not drawn:
        return operation
    assert isinstance(operation, ForwardBackwardRequest)
    seeds = {name: float(seed) for name, seed in drawn.items()}
    return replace(operation, loss_fn_config={**operation.loss_fn_config, **seeds})
