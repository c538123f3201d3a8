"""Estimates the bytes of each rank that trains drafts of a target: the target's, and the draft's in its own layout.

Imports no torch.
"""

from dataclasses import dataclass, replace

from ...protocol.parallel_spec import ParallelSpec
from ...shapes.draft_features import token_bytes
from ...shapes.draft_spec import sums_in_backward
from ...shapes.model_shape import ModelShape
from ..activations import forward_activations, rotation_bytes
from ..estimate import MemoryEstimate, estimate, num_learned
from ..layout_search import largest_that_fits, usable_bytes
from ..trainable_memory import bytes_per_number
from ..workload import Workload
from .draft_activations import DraftActivations, Sequences, draft_activations, feature_bytes
from .draft_load import DraftLoad

_FLOAT32 = 4

# Longest sequences are found in steps of so many tokens.
_STEP = 256


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
    the features of its tokens. exchange: of features between ranks, before the draft's pass. head: the target's output
    head, gathered. sampling: the target gathered to sample, when no pass runs.
    """

    target: int
    policy: int
    rotations: int
    kv_cache: int
    vectors: DraftVectors
    target_pass: int
    exchange: int
    activations: DraftActivations
    head: int
    sampling: int

    @property
    def held(self) -> int:
        """Returns the bytes between passes."""
        return self.target + self.policy + self.rotations + self.kv_cache + self.vectors.kept

    @property
    def total(self) -> int:
        scratch = self.vectors.scratch
        of_passes = scratch + max(self.target_pass, self.exchange, self.head + self.activations.total)
        return self.held + max(of_passes, self.sampling)


def draft_memory(
    shape: ModelShape, spec: ParallelSpec, load: Workload, draft: DraftLoad, draft_spec: ParallelSpec
) -> DraftMemory:
    """Returns the bytes of the rank that needs most. The layouts must have passed `check_layout` and `check_drafts`.

    Args:
        spec: of the target on the ranks that train the draft.
    """
    of_target = estimate(shape, spec, replace(load, samples=False))
    sequences = sequences_of(spec, draft_spec, load)
    exchange = _exchange(spec, draft_spec, load, draft, sequences)
    sums_early = sums_in_backward(draft_spec, spec)
    activations = draft_activations(draft, draft_spec, load, sequences, sums_early)
    if draft.stored and draft_spec.sp * draft_spec.tp > spec.sp * spec.tp:
        own = -(-sequences.num_tokens // draft_spec.sp)
        exchange = max(exchange, _exchange_of_stored(spec, load, draft, own))
        with_outputs = own * (_without_outputs(draft, load) + token_bytes(draft.stored, load.number_bytes))
        activations = replace(activations, features=max(activations.features, with_outputs))
    return DraftMemory(
        target=of_target.base,
        policy=_policy(shape, spec, load),
        rotations=load.longest * rotation_bytes(shape),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
        vectors=draft_vectors(draft, draft_spec, load, sums_early),
        target_pass=_target_pass(shape, spec, load, draft, of_target),
        exchange=exchange,
        activations=activations,
        head=round(estimate(shape, spec, replace(load, training="lora", samples=False)).gathered_head),
        sampling=estimate(shape, spec, load).sampling,
    )


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


def sequences_of(spec: ParallelSpec, draft_spec: ParallelSpec, load: Workload) -> Sequences:
    """Returns what a shard group gets of the micro-batches of the ranks that exchange features, which are full of the
    longest sequences."""
    num_sharing, own = spec.sp * spec.tp, draft_spec.sp * draft_spec.tp
    micro_batches = max(1, own // num_sharing)
    shard_groups = max(1, num_sharing // own)
    in_micro_batch = load.tokens // load.longest
    number = -(-micro_batches * in_micro_batch // shard_groups)
    return Sequences(number, min(number, in_micro_batch), load.longest)


def longest_sequence(
    shape: ModelShape,
    spec: ParallelSpec,
    load: Workload,
    draft: DraftLoad,
    draft_spec: ParallelSpec,
    device_bytes: int,
    most: int,
) -> int:
    """Returns the tokens of the longest sequence that fits a device, 0 if none does."""

    def fits(number: int) -> bool:
        longer = replace(load, longest=_STEP * number)
        return draft_memory(shape, spec, longer, draft, draft_spec).total <= usable_bytes(device_bytes)

    return _STEP * largest_that_fits(most // _STEP, fits)


def _policy(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    """Returns the bytes of the weights of a target that is a policy, with a copy for products if they need one."""
    each = bytes_per_number(load.with_slots(1))
    return num_learned(shape, spec, load.with_slots(1)) * (each.weights + each.copies)


def _target_pass(
    shape: ModelShape, spec: ParallelSpec, load: Workload, draft: DraftLoad, of_target: MemoryEstimate
) -> int:
    """Returns the bytes of the target's pass. At its end the captured layers are joined."""
    tokens = -(-load.tokens // (spec.sp * (spec.tp if load.tp_activations == "sharded" else 1)))
    captured = draft.sizes.captured * draft.sizes.hidden * load.number_bytes
    features = tokens * (feature_bytes(draft, load) + captured)
    of_pass = forward_activations(shape, spec, load)
    in_layers = of_pass.kept + of_pass.working + of_target.gathered + of_target.prefetched + of_target.dequantized
    return in_layers + features


def _exchange(
    spec: ParallelSpec, draft_spec: ParallelSpec, load: Workload, draft: DraftLoad, sequences: Sequences
) -> int:
    """Returns the bytes of the features before and after the exchange, and of the captured layers on their way: as
    sent, and as received."""
    if spec.sp * spec.tp == draft_spec.sp * draft_spec.tp == 1:
        return 0
    before, after = -(-load.tokens // (spec.sp * spec.tp)), -(-sequences.num_tokens // draft_spec.sp)
    captured = draft.sizes.captured * draft.sizes.hidden * load.number_bytes
    return (before + after) * (feature_bytes(draft, load) + captured)


def _exchange_of_stored(spec: ParallelSpec, load: Workload, draft: DraftLoad, after: int) -> int:
    """Returns the bytes of features while outputs that are stored in the draft's form are exchanged: as read, as sent,
    as received, and in order.

    Args:
        after: the tokens of which this rank has features after the exchange.
    """
    before = -(-load.tokens // (spec.sp * spec.tp))
    outputs = token_bytes(draft.stored, load.number_bytes)
    return (before + after) * (_without_outputs(draft, load) + 2 * outputs)


def _without_outputs(draft: DraftLoad, load: Workload) -> int:
    """Returns the bytes of a token's embedding and captured layers."""
    return feature_bytes(draft, load) - draft.sizes.hidden * load.number_bytes
