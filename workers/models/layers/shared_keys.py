"""A packed row in which layers use what an earlier layer computed: its keys and values, or its choice of tokens."""

from collections.abc import Sequence

from torch import Tensor

from ...ops.attention import AttendingPacking, AttentionKind, Packing, attend
from ...ops.recurrence import Recurrence, recur
from ...ops.token_index import IndexKind, IndexQueries, choose


class SharingRow:
    """Implements AttendingPacking for one pass, and keeps what some layers compute for later ones.

    A cache has shared keys and values in the place of the layer that computed them. packing: the row itself.
    """

    def __init__(self, packing: Packing | AttendingPacking, sources: Sequence[int | None]) -> None:
        """Keeps it of the layers `sources`, see ModelShape.sources."""
        self.packing, self._sources = packing, sources
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    @property
    def longest(self) -> int:
        return self.packing.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        self.keep(kind.layer, (key, value))
        return attend(query, key, value, self.packing, kind)

    def attend_again(self, query: Tensor, kind: AttentionKind) -> Tensor:
        """Attends to the keys and values of the layer `kind.layer`, which has run in this pass."""
        key, value = self._kept[kind.layer]
        return attend(query, key, value, self.packing, kind)

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        chosen = choose(queries, key, self.packing, kind)
        self.keep(kind.layer, () if chosen is None else (chosen,))
        return chosen

    def chosen_before(self, layer: int) -> Tensor | None:
        """Returns what the indexer has chosen whose choice this layer uses, see `choose`."""
        return next(iter(self.kept(self._sources[layer])), None)

    def kept(self, layer: int | None) -> tuple[Tensor, ...]:
        return () if layer is None else self._kept.get(layer, ())

    def keep(self, layer: int, kept: Sequence[Tensor]) -> None:
        """Keeps this of a layer, if later ones use it."""
        if kept and layer in self._sources:
            self._kept[layer] = tuple(kept)

    def of_layer(self, source: int | None, kept: Sequence[Tensor]) -> "SharingRow":
        """Returns the row for a single layer, with what it takes from the layer `source`."""
        row = SharingRow(self.packing, self._sources)
        if source is not None:
            row.keep(source, kept)
        return row

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        return recur(op, inputs, self.packing)
