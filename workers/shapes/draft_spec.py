"""The layouts that drafts can have on the ranks of a base model. Imports no torch."""

from ..protocol.parallel_spec import ParallelSpec
from .model_shape import ModelDescription, ModelShape


def default_draft_spec(base: ParallelSpec, heads: int) -> ParallelSpec:
    """Returns the layout that divides tokens as the target's ranks do if its sp divides the draft's heads, else one
    that divides sequences only."""
    sp = base.sp if heads % base.sp == 0 else 1
    return ParallelSpec(replicas=base.num_ranks // sp, sp=sp)


def sums_in_backward(spec: ParallelSpec, base: ParallelSpec) -> bool:
    """True if ranks sum a draft's gradients while a backward pass runs: several have the same weights, and all run as
    many passes at the same time, since passes of the target need them together."""
    return base.has_forward_collectives and spec.num_ranks > spec.tp


def check_drafts(spec: ParallelSpec, base: ParallelSpec, target: ModelDescription) -> None:
    """Raises ValueError if the layout is not possible for the target. A target of another kind than ModelShape is
    checked when it is loaded."""
    if isinstance(target, ModelShape) and target.attentions:
        attention = target.attentions[0]
        check_draft_spec(spec, base, attention.heads, attention.kv_heads)


def check_draft_spec(spec: ParallelSpec, base: ParallelSpec, heads: int, kv_heads: int) -> None:
    """Raises ValueError if the layout is not possible. A draft has as many heads and kv_heads as its target."""
    if spec.fsdp * spec.ep > 1:
        raise ValueError(f"--draft-parallel {spec.axes}: drafts support the axes replicas, sp and tp: use only these")
    if spec.num_ranks != base.num_ranks:
        raise ValueError(
            f"--draft-parallel {spec.axes}: this is {spec.num_ranks} ranks, but the model has {base.num_ranks}, by"
            f" {base}, and all of them train drafts: use as many, or give drafts other ranks with --role-group"
            " draft=LAYOUT"
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
            f"--draft-parallel {spec.axes}: {own} ranks share a sequence of a draft, and {sharing} share one of the"
            f" model by {base}: one of these numbers must divide the other"
        )
    if base.num_ranks // base.replicas % own:
        raise ValueError(
            f"--draft-parallel {spec.axes}: {own} ranks share a sequence of a draft, but the model's replicas in"
            f" {base} run independently: use fsdp in place of replicas for the model"
        )
