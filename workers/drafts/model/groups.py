"""The layout of draft training: how the ranks of a base model divide the work of its drafts, which may differ from the
layout of the base model."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ...parallel.mesh import Mesh, Team
from ...protocol.parallel_spec import SINGLE, ParallelSpec
from ...shapes.draft_spec import check_draft_spec, default_draft_spec, sums_in_backward


@dataclass(frozen=True, eq=False)
class DraftGroups:
    """The rank groups that train drafts together.

    mesh: the base model's ranks in the layout of the drafts. Ranks along replicas train on different sequences, ranks
    along sp on different shards of the same sequences, and ranks along tp have different parts of the draft's layers.
    The sp * tp ranks at one position along replicas are a shard group.
    feature_team: the ranks that exchange captured features. Every `num_sharing` neighbours among them share one
    micro-batch. sums_in_backward: see draft_spec.py.
    """

    mesh: Mesh
    feature_team: Team
    num_sharing: int
    sums_in_backward: bool

    @staticmethod
    def of(base: Mesh, target: PreTrainedConfig, wanted: ParallelSpec | None) -> "DraftGroups":
        """Returns the groups for the layout that the user wants.

        All ranks call this together, since it may create process groups.

        Args:
            wanted: None = `default_draft_spec`.
        Raises:
            ValueError: the layout is not possible on the base model's ranks.
        """
        if base.is_single and wanted in (None, SINGLE):
            return DraftGroups.alone()
        config: Any = target.get_text_config().per_layer_config[0]
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        spec = wanted or default_draft_spec(base.spec, heads)
        check_draft_spec(spec, base.spec, heads, kv_heads)
        mesh = base if spec == base.spec else Mesh(spec, base.rank)
        num_sharing = base.spec.sp * base.spec.tp
        feature_team = (base if num_sharing > spec.sp * spec.tp else mesh).along("sp", "tp")
        return DraftGroups(mesh, feature_team, num_sharing, sums_in_backward(spec, base.spec))

    @staticmethod
    def alone() -> "DraftGroups":
        return DraftGroups(Mesh(), Mesh().along(), 1, sums_in_backward=False)

    @property
    def num_micro_batches(self) -> int:
        return self.feature_team.size // self.num_sharing

    @property
    def num_shard_groups(self) -> int:
        return self.feature_team.size // self._shard_group_size

    def shard_group_of(self, index: int) -> int:
        """Returns the shard group of the rank with this index in the feature team."""
        return index // self._shard_group_size

    def shard_of(self, index: int) -> int:
        """Returns which sequence shard of its group the rank with this index in the feature team has."""
        return index % self._shard_group_size // self.mesh.spec.tp

    @property
    def _shard_group_size(self) -> int:
        return self.mesh.spec.sp * self.mesh.spec.tp
