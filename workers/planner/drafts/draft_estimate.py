"""Estimates the bytes of each rank that trains drafts of a target: the target's, and the draft's in its own layout.

A draft's activations are a measured ratio of what its layers compute for a token. Imports no torch.
"""

from dataclasses import dataclass, replace
from math import prod

from ...protocol.parallel_spec import ParallelSpec
from ...shapes.draft_sizes import token_bytes
from ...shapes.draft_spec import sums_in_backward
from ...shapes.model_shape import ModelShape
from ...shapes.parts.windows import MAX_SCORES
from ..activations import forward_activations, rotation_bytes
from ..estimate import MemoryEstimate, estimate, num_learned
from ..layout_search import largest_that_fits, usable_bytes
from ..trainable_memory import bytes_per_number
from ..workload import Workload
from .draft_load import DraftLoad

_FLOAT32 = 4

LENGTH_STEP = 256
"""The step in which longest sequences are searched; models of fewer positions are tried at their own length."""

# Measured with both kinds of drafts: what a layer keeps for a token, in times of two states, the MLP's features and
# queries, and three bytes of each feature of a state for norms in float32.
_RATIO = 4.5
# Tensors with the logits of a chunk that exist at a time (see logit_budget.py).
_LOGITS = 5


@dataclass(frozen=True)
class DraftVectors:
    """Bytes of a draft's vectors on a rank.

    weights: those that it computes with. masters: its part of them in float32, 0 if these are the weights. gradients:
    its part of those of a window. scratch: the gradients of an operation that runs, or its part of them, if ranks sum
    them in each backward pass.
    """

    weights: int
    masters: int
    gradients: int
    moments: int
    scratch: int

    @property
    def kept(self) -> int:
        """Returns the bytes between operations."""
        return self.weights + self.masters + self.gradients + self.moments


@dataclass(frozen=True)
class DraftMemory:
    """Bytes of a rank.

    target: of the base model. policy: what the target has learned, an adapter or all weights. rotations: cosines and
    sines of all positions, which the target keeps. target_pass: of the target's forward pass, with gathered weights and
    the features of its tokens. exchange: of features between ranks, before the draft's pass.
    num_tokens: tokens of the sequences that the rank trains its draft on. features: of these. kept: for the draft's
    backward pass. working: logits of a chunk, gradients of weights, or scores. head: the target's output head,
    gathered. sampling: the target gathered to sample, when no pass runs.
    """

    target: int
    policy: int
    rotations: int
    kv_cache: int
    vectors: DraftVectors
    target_pass: int
    exchange: int
    num_tokens: int
    features: int
    kept: int
    working: int
    head: int
    sampling: int

    @property
    def held(self) -> int:
        return self.target + self.policy + self.rotations + self.kv_cache + self.vectors.kept

    @property
    def draft_pass(self) -> int:
        return self.features + self.kept + self.working

    @property
    def total(self) -> int:
        of_passes = self.vectors.scratch + max(self.target_pass, self.exchange, self.head + self.draft_pass)
        return self.held + max(of_passes, self.sampling)


def draft_memory(
    shape: ModelShape, spec: ParallelSpec, load: Workload, draft: DraftLoad, draft_spec: ParallelSpec
) -> DraftMemory:
    """Returns the bytes of the rank that needs most. The layouts must have passed `check_layout` and `check_drafts`.

    Args:
        spec: of the target on the ranks that train the draft.
    """
    of_target = estimate(shape, spec, replace(load, samples=False))
    sums_early = sums_in_backward(draft_spec, spec)
    captured = draft.sizes.captured * draft.sizes.hidden * load.number_bytes
    num_sharing, num_own = spec.sp * spec.tp, draft_spec.sp * draft_spec.tp
    # Sequences of the longest length that a shard group gets of the micro-batches of ranks that exchange features, and
    # those of one micro-batch, which it trains on together.
    of_micro_batch = load.tokens // load.longest
    number = -(-max(1, num_own // num_sharing) * of_micro_batch // max(1, num_sharing // num_own))
    at_once = min(number, of_micro_batch)
    # Tokens of a rank before and after features are exchanged, as sent and as received.
    before, after = -(-load.tokens // num_sharing), -(-number * load.longest // draft_spec.sp)
    features, stored = feature_bytes(draft, load), 0
    if draft.stored and num_own > num_sharing:
        # In place of the last states.
        stored = token_bytes(draft.stored, load.number_bytes)
        features -= draft.sizes.hidden * load.number_bytes
    exchange = (before + after) * (features + max(captured, 2 * stored))
    kept, working = _of_pass(draft, draft_spec, load, at_once)
    if sums_early and draft.algorithm == "eagle3":
        working += _FLOAT32 * draft.sizes.vocabulary * draft.sizes.hidden
    policy = load.with_slots(1)
    return DraftMemory(
        target=of_target.base,
        policy=num_learned(shape, spec, policy) * (bytes_per_number(policy).weights + bytes_per_number(policy).copies),
        rotations=load.longest * rotation_bytes(shape),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
        vectors=draft_vectors(draft, draft_spec, load, sums_early),
        target_pass=_target_pass(shape, spec, load, of_target, feature_bytes(draft, load) + captured),
        exchange=exchange if num_sharing * num_own > 1 else 0,
        num_tokens=after,
        features=after * (features + stored),
        kept=kept,
        working=working,
        head=round(estimate(shape, spec, replace(load, training="lora", samples=False)).gathered_head),
        sampling=estimate(shape, spec, load).sampling,
    )


def _of_pass(draft: DraftLoad, spec: ParallelSpec, load: Workload, at_once: int) -> tuple[int, int]:
    """Returns what a pass over sequences of the longest length keeps for its backward pass, and needs at its end."""
    sizes, number, is_eagle = draft.sizes, load.number_bytes, draft.algorithm == "eagle3"
    hidden, queries, keys = sizes.hidden, sizes.queries // spec.tp, sizes.keys // spec.tp
    computed = number * (2 * hidden + sizes.intermediate // spec.tp + queries) + 3 * hidden
    layer, tokens = _RATIO * computed, at_once * load.longest
    if is_eagle:
        # Every step runs the layer for all tokens.
        rows, depth, vocabulary = -(-tokens // spec.sp), draft.ttt_length, sizes.vocabulary
        again = depth * number * (3 * hidden + 2 * queries + 2 * keys) + layer
        kept = rows * (depth * layer if load.activations == "keep" else again)
        working = _FLOAT32 * sum(prod(shape) for name, shape in draft.shapes(spec.tp).items() if name != "lm_head")
    else:
        # Each layer runs for all blocks, and reads the keys of all tokens.
        rows = -(-at_once * min(draft.num_anchors, load.longest) // spec.sp)
        depth, vocabulary = draft.block_size - 1, sizes.target_vocabulary
        kept = rows * draft.block_size * sizes.layers * layer
        kept += tokens * number * (3 * hidden + 2 * keys * sizes.layers)
        working = 2 * _FLOAT32 * MAX_SCORES
    rows = min(rows, draft.budget.chunk_rows(depth, depth * vocabulary))
    return int(kept), max(working, _LOGITS * _FLOAT32 * rows * depth * vocabulary)


def feature_bytes(draft: DraftLoad, load: Workload) -> int:
    """Returns the bytes of a token's features: the embedding, captured layers, and for eagle3 the last states."""
    states = 1 + draft.sizes.captured + (draft.algorithm == "eagle3")
    return states * draft.sizes.hidden * load.number_bytes


def draft_vectors(draft: DraftLoad, spec: ParallelSpec, load: Workload, sums_early: bool) -> DraftVectors:
    """Returns the bytes of a draft's vectors; all ranks but those along tp share out what is float32.

    Args:
        sums_early: whether gradients are summed in the backward pass, see draft_spec.py.
    """
    num_shards = spec.num_ranks // spec.tp
    size, each = draft.vector_size(spec.tp, num_shards), bytes_per_number(load)
    of_moments = bytes_per_number(replace(load, training="full")).optimizer
    has_copy = load.number_bytes < _FLOAT32
    return DraftVectors(
        weights=size * load.number_bytes,
        masters=size // num_shards * each.weights if has_copy else 0,
        gradients=size // num_shards * _FLOAT32,
        moments=round(size // num_shards * of_moments),
        scratch=(size // num_shards if sums_early else size) * _FLOAT32,
    )


def longest_sequence(
    shape: ModelShape,
    spec: ParallelSpec,
    load: Workload,
    draft: DraftLoad,
    draft_spec: ParallelSpec,
    device_bytes: int,
    most: int,
) -> int:
    """Returns the tokens of the longest sequence that fits a device, 0 if none of LENGTH_STEP tokens does."""
    step = min(LENGTH_STEP, most)

    def fits(number: int) -> bool:
        longer = replace(load, longest=step * number)
        return draft_memory(shape, spec, longer, draft, draft_spec).total <= usable_bytes(device_bytes)

    return step * largest_that_fits(most // step, fits)


def _target_pass(
    shape: ModelShape, spec: ParallelSpec, load: Workload, of_target: MemoryEstimate, features: int
) -> int:
    """Returns the bytes of the target's pass. At its end the captured layers are joined."""
    tokens = -(-load.tokens // (spec.sp * (spec.tp if load.tp_activations == "sharded" else 1)))
    of_pass = forward_activations(shape, spec, load)
    in_layers = of_pass.kept + of_pass.working + of_target.gathered + of_target.prefetched + of_target.dequantized
    return in_layers + tokens * features
