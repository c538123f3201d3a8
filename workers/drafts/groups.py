"""DraftGroups: how the ranks of a base model share out the work of its drafts, by a factorisation of their own."""

from dataclasses import dataclass

from ..parallel.mesh import Mesh, Team
from ..parallel.spec import ParallelSpec


@dataclass(frozen=True, eq=False)
class DraftGroups:
    """mesh: of the same ranks as the base model's; along its replicas each takes other sequences, along sp stretches of
    the same ones.

    audience: those that have, together, what the target was told for some blocks of the mesh: ranks along sp. states:
    how many of the audience have the states of one micro-batch. block, num_blocks: which of the audience's is this
    rank's, and how many there are.
    """

    mesh: Mesh
    audience: Team
    num_sharing: int

    @staticmethod
    def of(base: Mesh, heads: int) -> "DraftGroups":
        """heads: of a draft."""
        spec = default_spec(base.spec, heads)
        mesh = base if spec == base.spec else Mesh(spec, base.rank)
        return DraftGroups(mesh, base.along("sp", "tp"), base.along("sp", "tp").size)

    @property
    def stretches(self) -> Team:
        return self.mesh.along("sp")

    @property
    def block_size(self) -> int:
        return self.mesh.spec.sp

    @property
    def num_blocks(self) -> int:
        return self.audience.size // self.block_size

    def block_of(self, index: int) -> int:
        """Of a rank of the audience."""
        return index // self.block_size

    def stretch_of(self, index: int) -> int:
        """Which of its block's a rank of the audience has."""
        return index % self.block_size


def default_spec(base: ParallelSpec, heads: int) -> ParallelSpec:
    """Tokens as the target's ranks share them out, where heads go into as many parts; else sequences."""
    sp = base.sp if heads % base.sp == 0 else 1
    return ParallelSpec(replicas=base.num_ranks // sp, sp=sp)
