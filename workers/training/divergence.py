"""Finds runs whose weights have diverged."""

from weakref import WeakKeyDictionary

import torch

from ..protocol.calls import Failure
from ..state.trainable import Trainable


class DivergenceCheck:
    """Checks that weights are finite, once after each change.

    Losses would not show it: attention returns finite numbers for scores that are NaN.
    """

    def __init__(self) -> None:
        self._changes_when_finite: WeakKeyDictionary[Trainable, int] = WeakKeyDictionary()

    def failure(self, run_id: str, model: Trainable) -> Failure | None:
        """Returns why the run cannot be computed; None if its weights are finite."""
        if self._changes_when_finite.get(model) != model.vectors.num_changes:
            low, high = torch.aminmax(model.weights)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                message = (
                    f"the weights of run {run_id} are not finite: they have diverged; continue from an earlier"
                    " checkpoint with a lower learning rate"
                )
                return Failure(message, "user")
            self._changes_when_finite[model] = model.vectors.num_changes
        return None
