"""Decides once per packed row which matrices its adapted layers multiply with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .adapter import Adapter
from .delta import LoraDelta
from .lora_experts import ExpertPlan
from .segment import Segment, group_segments
from .segmented_matmul import SegmentedMatmul, choose_matmul
from .shared_factors import SharedGroup
from .stacked_factors import LinearSite, StackedFactors


@dataclass(frozen=True)
class PlanContext:
    """Holds what a plan depends on in addition to its segments.

    aligned: whether all features are multiples of 16 bytes.
    """

    device: torch.device
    aligned: bool


class BatchPlan:
    """The segments of one packed row, grouped for products.

    It holds copies of the matrices, so a change of weights makes it stale.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        kind: PlanContext,
        previous: "BatchPlan | None" = None,
        pass_adapters: Sequence[Adapter] = (),
    ) -> None:
        """Groups the segments.

        Args:
            previous: a plan of other segments, whose copies are reused where the adapters are the same.
            pass_adapters: all adapters of a pass, in the same order on all ranks; needed if tokens of other ranks are
                routed to this rank's experts.
        """
        self._segments = tuple(segments)
        self._num_rows = segments[-1].stop if segments else 0
        groups = group_segments(segments)
        if kind.device.type == "cpu":
            groups = [part for group in groups for part in group.split()]
        self._groups = [
            (group, choose_matmul(group.lengths, group.scales, kind.device, kind.aligned)) for group in groups
        ]
        adapters = [adapter for group in groups for adapter in group.adapters]
        self._versions = [(adapter, _version(adapter)) for adapter in adapters]
        self._terms: dict[LinearSite, LoraDelta | None] = {}
        self._factors: dict[tuple[LinearSite, tuple[Adapter, ...]], StackedFactors] = {}
        previous = previous if previous is not None and previous.is_current else None
        of_experts = previous.experts if previous is not None else None
        sharing = SharedGroup.all_of(self._groups)
        self.experts = ExpertPlan(self._segments, sharing, pass_adapters or adapters, kind.device, of_experts)
        if previous is not None:
            wanted = {tuple(group.adapters) for group in groups}
            self._factors = {key: factors for key, factors in previous._factors.items() if key[1] in wanted}

    @property
    def is_current(self) -> bool:
        """True if no weight has changed or moved since the plan was built."""
        return all(_version(adapter) == version for adapter, version in self._versions)

    def is_valid_for(self, segments: tuple[Segment, ...]) -> bool:
        """True if the plan is of these segments and still current."""
        return self._segments == segments and self.is_current

    def terms(self, site: LinearSite) -> LoraDelta | None:
        """Returns the terms at a site, or None if no adapter adapts it. The first call builds them."""
        if site not in self._terms:
            adapted = [(group, rows) for group, rows in self._groups if site.names[0] in group.adapters[0].pairs]
            groups = [(group, rows, self._factors_of(site, tuple(group.adapters), rows)) for group, rows in adapted]
            self._terms[site] = LoraDelta(site, groups, self._num_rows) if groups else None
        return self._terms[site]

    def _factors_of(self, site: LinearSite, adapters: tuple[Adapter, ...], rows: SegmentedMatmul) -> StackedFactors:
        key = site, adapters
        if key not in self._factors:
            self._factors[key] = StackedFactors(site, adapters, rows)
        return self._factors[key]


def _version(adapter: Adapter) -> tuple[int, int | None]:
    return adapter.vectors.num_changes, adapter.vectors.weights_address
