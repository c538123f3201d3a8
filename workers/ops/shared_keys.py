"""A packed row in which layers attend to the keys and values of an earlier layer."""

from collections.abc import Collection, Sequence

from torch import Tensor

from .attention import AttendingPacking, AttentionKind, Packing, attend
from .recurrence import Recurrence, recur


class SharingRow:
    """Implements AttendingPacking for one pass, and keeps the keys and values of some layers for later ones.

    A cache has them in the place of the layer that computed them.
    """

    def __init__(self, packing: Packing | AttendingPacking, sources: Collection[int]) -> None:
        """Keeps those of the layers with the numbers `sources`."""
        self._packing, self._sources = packing, sources
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def longest(self) -> int:
        return self._packing.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        if kind.layer in self._sources:
            self._kept[kind.layer] = key, value
        return attend(query, key, value, self._packing, kind)

    def attend_again(self, query: Tensor, kind: AttentionKind) -> Tensor:
        """Attends to the keys and values of the layer `kind.layer`, which has run in this pass."""
        return attend(query, *self._kept[kind.layer], self._packing, kind)

    def kept(self, layer: int | None) -> tuple[Tensor, ...]:
        """Returns the keys and values of a layer, nothing if they are not kept."""
        return () if layer is None else self._kept.get(layer, ())

    def keep(self, layer: int, kept: Sequence[Tensor]) -> None:
        """Keeps the keys and values of a layer, if there are any."""
        if kept:
            key, value = kept
            self._kept[layer] = key, value

    def of_layer(self, source: int | None, kept: Sequence[Tensor]) -> "SharingRow":
        """Returns the row for a single layer, with the keys and values that it takes from the layer `source`."""
        row = SharingRow(self._packing, self._sources)
        if source is not None:
            row.keep(source, kept)
        return row

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        return recur(op, inputs, self._packing)
