"""Refuses bounds on the ratio of ppo, cispo and gspo that leave out 1, where the ratio begins: they clip everything."""

import numpy as np

from ..training import ForwardBackwardRequest
from .formats import Invalid

CLIPPED_LOSSES = ("ppo", "cispo", "gspo")
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


def check_clip_bounds(request: ForwardBackwardRequest) -> None:
    """Raises Invalid if bounds in the options, or of a token with an advantage, leave out 1."""
    options = {name: value for name, value in request.loss_fn_config.items() if not isinstance(value, str)}
    low, high = options.get(_LOW), options.get(_HIGH)
    if (low is not None and low > 1) or (high is not None and high < 1):
        raise _wrong_bounds(request.loss_fn, low, high, "")
    for index, datum in enumerate(request.data):
        inputs = datum.loss_fn_inputs
        if _LOW not in inputs and _HIGH not in inputs:
            continue
        shape = datum.tokens.shape
        low, high, advantages = (inputs.get(name, np.ones(shape)) for name in (_LOW, _HIGH, "advantages"))
        if not all(each.shape == shape and each.dtype.kind in "fiub" for each in (low, high, advantages)):
            continue  # the workers refuse it by name
        wrong = np.flatnonzero((advantages != 0) & ((low > 1) | (high < 1)))
        if wrong.size:
            at = int(wrong[0])
            of_low, of_high = (float(inputs[name][at]) if name in inputs else None for name in (_LOW, _HIGH))
            raise _wrong_bounds(request.loss_fn, of_low, of_high, f"datum {index}, position {at}: ")


def _wrong_bounds(loss_fn: str, low: float | None, high: float | None, where: str) -> Invalid:
    given = " and ".join(f"{name} {value:g}" for name, value in ((_LOW, low), (_HIGH, high)) if value is not None)
    epsilons = 0.2 if low is None or abs(low) >= 1 else abs(low), 0.2 if high is None or abs(high) >= 1 else abs(high)
    return Invalid(
        f"{where}{loss_fn} has {given}: these are bounds on the ratio itself, and must contain 1. An epsilon of"
        f" {' below and '.join(f'{each:g}' for each in dict.fromkeys(epsilons))} is written {_LOW} {1 - epsilons[0]:g}"
        f" and {_HIGH} {1 + epsilons[1]:g}"
    )
