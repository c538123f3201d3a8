"""The layouts that drafts may have on the ranks of a base model. Imports no torch."""

from ..protocol.parallel_spec import ParallelSpec
from .model_shape import Model, ModelShape


def default_draft_spec(base: ParallelSpec, heads: int) -> ParallelSpec:
    """Tokens as the target's ranks share them out, where heads go into as many parts; else sequences."""
    sp = base.sp if heads % base.sp == 0 else 1
    return ParallelSpec(replicas=base.num_ranks // sp, sp=sp)


def check_drafts(spec: ParallelSpec, base: ParallelSpec, target: Model) -> None:
    """Of a target whose heads are known; of any other, who loads it finds out. Raises ValueError."""
    if isinstance(target, ModelShape):
        check_draft_spec(spec, base, target.heads, target.kv_heads)


def check_draft_spec(spec: ParallelSpec, base: ParallelSpec, heads: int, kv_heads: int) -> None:
    """heads, kv_heads: of a draft, the target's. Raises ValueError."""
    if spec.fsdp * spec.ep > 1:
        raise ValueError(f"--draft-parallel {spec.axes}: drafts are laid out along replicas, sp and tp: name these")
    if spec.num_ranks != base.num_ranks:
        raise ValueError(
            f"--draft-parallel {spec.axes}: these are {spec.num_ranks} ranks, and the model has {base.num_ranks}, by"
            f" {base}: all of them train drafts; to give these other ranks, use --role-group draft=LAYOUT"
        )
    if kv_heads % spec.tp:
        raise ValueError(
            f"--draft-parallel {spec.axes}: tp={spec.tp} does not divide {kv_heads} key/value heads of a draft"
        )
    if heads // spec.tp % spec.sp:
        raise ValueError(
            f"--draft-parallel {spec.axes}: sp={spec.sp} does not divide {heads // spec.tp} heads of a draft"
        )
    own, sharing = spec.sp * spec.tp, base.sp * base.tp
    if max(own, sharing) % min(own, sharing):
        raise ValueError(
            f"--draft-parallel {spec.axes}: {own} ranks have a sequence of a draft, {sharing} one of the model"
            f" by {base}: one of these numbers has to divide the other"
        )
    if base.num_ranks // base.replicas % own:
        raise ValueError(
            f"--draft-parallel {spec.axes}: {own} ranks have a sequence of a draft, and the model's go on by themselves"
            f" along replicas in {base}: lay it out by fsdp in their place"
        )
