"""Records which part of their devices' speed the recent work of a group's ranks has used."""

from collections import deque
from typing import Literal, get_args

from ...schemas.models import Utilization

Kind = Literal["training", "sampling"]

# The passes or slices that count as recent.
_NUM_RECENT = 64


class DeviceSpeed:
    """Records the operations of passes and slices, and the seconds that they took.

    peak: operations per second of a large product, on the devices of all ranks together.
    """

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self._recent = {kind: deque[tuple[float, float]](maxlen=_NUM_RECENT) for kind in get_args(Kind)}

    def record(self, kind: Kind, flops: float, seconds: float) -> None:
        self._recent[kind].append((flops, seconds))

    def utilization(self) -> Utilization:
        """Returns the part of the peak that recent work of each kind has reached, None before the first."""
        return Utilization(peak_flops=self.peak, **{kind: self._share_of_peak(kind) for kind in self._recent})

    def _share_of_peak(self, kind: Kind) -> float | None:
        recent = self._recent[kind]
        if not recent:
            return None
        return sum(flops for flops, _ in recent) / (self.peak * sum(seconds for _, seconds in recent))
