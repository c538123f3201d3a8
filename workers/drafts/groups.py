"""DraftGroups: how the ranks of a base model share out the work of its drafts, by a factorisation of their own."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..parallel.mesh import Mesh, Team
from ..protocol.parallel_spec import SINGLE, ParallelSpec
from ..shapes.draft_spec import check_draft_spec, default_draft_spec


@dataclass(frozen=True, eq=False)
class DraftGroups:
    """mesh: of the same ranks as the base model's: along its replicas each takes other sequences, along sp stretches of
    the same ones, along tp parts of the draft's layers. Those of one place along replicas are a block.

    audience: the ranks that bring each other what the target was told. Of these `num_sharing` neighbours have one
    micro-batch together.
    """

    mesh: Mesh
    audience: Team
    num_sharing: int

    @staticmethod
    def of(base: Mesh, target: PreTrainedConfig, wanted: ParallelSpec | None) -> "DraftGroups":
        """wanted: None = as `default_draft_spec` has it. Of all ranks at once. Raises ValueError on what cannot
        work."""
        if base.is_single and wanted in (None, SINGLE):
            return DraftGroups.alone()
        config: Any = target.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        spec = wanted or default_draft_spec(base.spec, heads)
        check_draft_spec(spec, base.spec, heads, kv_heads)
        mesh = base if spec == base.spec else Mesh(spec, base.rank)
        num_sharing = base.spec.sp * base.spec.tp
        audience = (base if num_sharing > spec.sp * spec.tp else mesh).along("sp", "tp")
        return DraftGroups(mesh, audience, num_sharing)

    @staticmethod
    def alone() -> "DraftGroups":
        """For drafts that this rank has for itself."""
        return DraftGroups(Mesh(), Mesh().along(), 1)

    @property
    def num_micro_batches(self) -> int:
        """Of the audience."""
        return self.audience.size // self.num_sharing

    @property
    def num_blocks(self) -> int:
        """Of the audience."""
        return self.audience.size // self._block_size

    def block_of(self, index: int) -> int:
        """Of a rank of the audience."""
        return index // self._block_size

    def stretch_of(self, index: int) -> int:
        """Which of its block's a rank of the audience has."""
        return index % self._block_size // self.mesh.spec.tp

    @property
    def _block_size(self) -> int:
        return self.mesh.spec.sp * self.mesh.spec.tp
