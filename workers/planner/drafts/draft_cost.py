"""Estimates the time that layouts take to train a draft on a token, from products and exchanges. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...drafts.training.draft_flops import DraftFlops, dflash_flops, eagle3_flops
from ...protocol.parallel_spec import ParallelSpec
from ...protocol.worker_config import LEAST_PASS_TOKENS
from ...shapes.draft_spec import sums_in_backward
from ...shapes.layouts.flops import ModelFlops, OwnFlops
from ...shapes.model_shape import ModelShape
from ...shapes.parts import Exchange
from ..exchanges import exchange_seconds, in_forward_pass
from ..speeds import Speeds
from ..workload import Workload
from .draft_estimate import feature_bytes, sequences_of
from .draft_load import DraftLoad

_FLOAT32 = 4


@dataclass(frozen=True)
class DraftCost:
    """The seconds for one token of all ranks' work together.

    target: products of the target's pass without a backward pass. draft: products of the draft's pass, with the output
    heads. exchanges: of both, with those of features and of the draft's gradients.
    """

    target: float
    draft: float
    exchanges: float

    @property
    def seconds(self) -> float:
        return self.target + self.draft + self.exchanges


def draft_cost(
    shape: ModelShape, spec: ParallelSpec, load: Workload, draft: DraftLoad, draft_spec: ParallelSpec, speeds: Speeds
) -> DraftCost:
    """Returns the cost of training on sequences of the longest length, whose features are not captured before.

    Args:
        spec: of the target on the ranks that train the draft.
    """
    import numpy as np  # imported late: the command line starts without it

    along_tp = ParallelSpec(tp=spec.tp, replicated=spec.replicated)
    of_target = ModelFlops(shape, along_tp).trunk(np.array([load.longest])) / load.longest / spec.num_data_shares
    flops = _flops(shape, draft, draft_spec.tp, load.longest).of_pass(True, load.activations != "keep")
    of_draft = flops / load.longest / draft_spec.replicas
    sequences = sequences_of(spec, draft_spec, load)
    sent = exchange_seconds(spec, in_forward_pass(shape, spec, load), speeds) / (load.tokens * spec.num_data_shares)
    own = sequences.at_once * sequences.length
    exchanged = list(in_draft_pass(spec, draft_spec, load, draft, -(-own // draft_spec.sp)))
    sent += exchange_seconds(draft_spec, exchanged, speeds) / (own * draft_spec.replicas)
    return DraftCost(
        of_target / spec.sp / speeds.flops_per_second, of_draft / draft_spec.sp / speeds.flops_per_second, sent
    )


def _flops(shape: ModelShape, draft: DraftLoad, tp: int, length: int) -> DraftFlops:
    """Returns the operations of ranks along sp for one sequence, all of whose tokens count."""
    of_head = ModelFlops(shape).head(1, OwnFlops()) / tp
    if draft.algorithm == "eagle3":
        depth = min(draft.ttt_length, length)
        predictions = length * depth - depth * (depth + 1) // 2
        stored = any("logits" in name for name in draft.stored)
        of_target = 0.0 if stored else length * of_head
        return eagle3_flops(draft.sizes, draft.shapes(tp), length, depth, predictions, of_target, tp)
    size, num_blocks = draft.block_size, min(draft.num_anchors, length)
    pairs = num_blocks * size * (length // 2 + size)
    frozen = num_blocks * (size - 1) * of_head
    return dflash_flops(draft.sizes, draft.shapes(tp), length, size, num_blocks, pairs, frozen, tp)


def in_draft_pass(
    spec: ParallelSpec, draft_spec: ParallelSpec, load: Workload, draft: DraftLoad, own: int
) -> Iterator[Exchange]:
    """Yields what a rank of the draft sends in one micro-batch.

    Args:
        own: the tokens of this rank along sp.
    """
    sizes, number, sp, tp = draft.sizes, load.number_bytes, draft_spec.sp, draft_spec.tp
    is_eagle = draft.algorithm == "eagle3"
    # The rows and layers that a rank computes: an eagle3 draft runs its layer once for each step.
    rows = own if is_eagle else -(-own * draft.block_size * draft.num_anchors // max(load.longest, draft.num_anchors))
    times = draft.ttt_length if is_eagle else sizes.layers
    if tp > 1:
        yield from _along_tp(draft, draft_spec, load, own, rows)
    if sp > 1 and is_eagle:
        # By heads: each step's queries and results, in the backward pass again, with their gradients; and the keys and
        # values of the first step. In float32 the logarithms of the sums of each head's scores.
        numbers = number * (6 * times * sizes.queries + 4 * sizes.keys) + _FLOAT32 * 2 * times * sizes.heads
        yield Exchange("sp", own * numbers / tp * (sp - 1) / sp, 8 * times + 4)
    elif sp > 1:
        # Keys and values of all tokens, in each layer.
        yield Exchange("sp", 2 * times * own * number * 2 * sizes.keys / tp * (sp - 1), 4 * times)
    yield from _gradients(spec, draft_spec, load, draft, own)
    num_sharing = max(sp * tp, spec.sp * spec.tp)
    if num_sharing > 1:
        # Each token's features go to all ranks along tp of the draft.
        before = load.tokens / (spec.sp * spec.tp)
        to_others = tp * (num_sharing - 1) / num_sharing
        yield Exchange("tp" if num_sharing == tp else "sp", to_others * before * feature_bytes(draft, load), 2)


def _along_tp(draft: DraftLoad, spec: ParallelSpec, load: Workload, own: int, rows: int) -> Iterator[Exchange]:
    """Yields the sums over tp: of the outputs of attention and MLP, of the gradients by their inputs, and of those by
    the draft's outputs, which these ranks share out to score.

    Args:
        own, rows: the tokens of this rank, and those for which its layers run.
    """
    number, of_state = 2 * (spec.tp - 1) / spec.tp, draft.sizes.hidden * load.number_bytes
    if draft.algorithm == "eagle3":
        # In each step; recomputed layers sum their outputs again. The embeddings' products are the same in each step.
        sums = draft.ttt_length * (5 if load.activations == "keep" else 7) + 1
        yield Exchange("tp", sums * own * number * of_state, sums)
    else:
        # Once also the gradients by the states of the tokens before the blocks.
        sums = 4 * draft.sizes.layers + 1
        yield Exchange("tp", (sums * rows + own) * number * of_state, sums + 1)


def _gradients(
    spec: ParallelSpec, draft_spec: ParallelSpec, load: Workload, draft: DraftLoad, own: int
) -> Iterator[Exchange]:
    """Yields the sums of the draft's gradients in float32: in each micro-batch, or once in an operation, which is taken
    to have the tokens of a pass."""
    tp, num_shards = draft_spec.tp, draft_spec.num_ranks // draft_spec.tp
    in_operation = max(1.0, LEAST_PASS_TOKENS / (own * num_shards))
    whole = sum(prod(each) for name, each in draft.shapes().items() if each == draft.shapes(tp)[name])
    yield Exchange("tp", _FLOAT32 * whole * 2 * (tp - 1) / tp / in_operation, (tp > 1) / in_operation)
    share = 1.0 if sums_in_backward(draft_spec, spec) else 1 / in_operation
    num_bytes = _FLOAT32 * draft.vector_size(tp, num_shards) * (num_shards - 1) / num_shards
    yield Exchange("replicas", share * num_bytes, share * len(draft.shapes()) * (num_shards > 1))
