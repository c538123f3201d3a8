"""Seeds: those that a request omits are drawn at submit and journaled with it, so that a replay repeats them."""

import secrets
from collections.abc import Mapping

from ...schemas.training import ForwardBackwardRequest

_SEED_LIMIT = 1 << 31
_SEED = "seed"
_SEEDED_LOSSES = {"dflash"}


def draw_seed() -> int:
    return secrets.randbelow(_SEED_LIMIT)


def draw_missing_seeds(request: ForwardBackwardRequest) -> Mapping[str, int]:
    """Returns the seeds that the request's loss needs and its config lacks."""
    is_missing = request.loss_fn in _SEEDED_LOSSES and _SEED not in request.loss_fn_config
    return {_SEED: draw_seed()} if is_missing else {}
