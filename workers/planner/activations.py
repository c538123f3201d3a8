"""Activations: what a pass over a micro-batch needs on a rank of a layout.

Mirrors what trunk.py, layer_inputs.py, fused.py, attention.py, experts.py, heads/ and lora/linear.py keep for the way
back; tests compare it with passes. Imports no torch.
"""

from dataclasses import dataclass

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import Experts, ModelShape
from ..shapes.sequence_split import SequenceSplit
from ..shapes.windows import MOST_SCORES, queries_of_mask
from .load import Load
from .parameters import OwnFeatures

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class Activations:
    """Of a pass over a micro-batch. kept: for the way back. working, head: what the last layer takes, and the logits of
    a chunk; they are not there at once. host: in host memory beside the device's."""

    kept: int
    working: int
    head: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.kept + max(self.working, self.head)


def activations(shape: ModelShape, spec: ParallelSpec, load: Load) -> Activations:
    """Of the largest micro-batch."""
    tokens = -(-load.tokens // spec.sp)
    of_pass = _Pass(shape, spec, load)
    at_work = _window_scores(shape, spec, load) + _expert_gradients(shape, spec, load)
    return Activations(
        kept=int(tokens * of_pass.kept()),
        working=int(tokens * of_pass.working()) + at_work,
        head=int(tokens * of_pass.head()) + _logits(shape, spec, load),
        host=int(tokens * of_pass.host()),
    )


class _Pass:
    """Bytes by the tokens of a rank along sp."""

    def __init__(self, shape: ModelShape, spec: ParallelSpec, load: Load) -> None:
        self._shape, self._spec, self._load = shape, spec, load
        self._own = OwnFeatures.of(shape, spec)
        self._number = load.number_bytes
        self._is_full = load.training == "full"
        self._stream_parts = spec.tp if load.tp_activations == "sharded" else 1
        # A state of the residual stream, and the inverse of its norm.
        self._stream = (self._number * shape.hidden + _FLOAT32) / self._stream_parts
        # What norms around attention keep, or around the feed-forward part.
        self._norms = self._stream * len(shape.family.norms.names) / 2
        self._split = _split(shape, spec)

    def kept(self) -> float:
        """For the way back.

        The first sum of the residual stream is the embedding, which nothing needs again but a gradient of its own; the
        last norm keeps one more, and its result. Behind them: cosines and sines, tokens, positions.
        """
        shape = self._shape
        rotations = 2 if shape.family.rotates_by_kind else 1
        rotation = rotations * _FLOAT32 * (shape.head_dim + shape.head_dim // 2) + 4 * _INT64
        embedding = self._stream if self._is_full and self._load.activations == "keep" else 0
        return self._kept_of_layers() + embedding + self._stream + rotation

    def host(self) -> float:
        return self._shape.num_layers * self._input if self._load.activations == "offload" else 0.0

    def working(self) -> float:
        """Beside what is kept: the last experts at work, or the way back through the last norm and what it follows."""
        of_layer = self._running_again() + max(self._experts_at_work(), self._stream + self._features_way_back())
        return max(self._stream + self._norm_way_back(), of_layer)

    @property
    def _input(self) -> float:
        """Of a layer: the sum of what it takes."""
        return self._number * self._shape.hidden / self._stream_parts

    def _kept_of_layers(self) -> float:
        shape = self._shape
        if self._load.activations == "recompute":
            return shape.num_layers * self._input
        if self._load.activations == "offload":
            return min(2, shape.num_layers) * self._input  # of the one at work, and of the next
        of_layers = shape.num_layers * self._kept_by_attention() + shape.num_dense_layers * self._kept_by_dense()
        if shape.experts:
            of_layers += len(shape.experts.layers) * self._kept_by_experts(shape.experts)
        return of_layers

    def _running_again(self) -> float:
        """The layer that keeps most, with what it gives and the gradient of that."""
        if self._load.activations == "keep":
            return 0.0
        experts = self._shape.experts
        of_kinds = [self._kept_by_dense()] if self._shape.num_dense_layers else []
        of_kinds += [self._kept_by_experts(experts)] if experts else []
        return self._kept_by_attention() + max(of_kinds) + 2 * self._input

    def head(self) -> float:
        """The gradient by the last hidden states of the rows that a rank scores."""
        return self._number * self._shape.hidden / self._spec.tp

    def _kept_by_attention(self) -> float:
        own = self._own
        repeated = max(1.0, self._split.ulysses / own.kv_heads)  # each of them has a head at least
        queries, keys = 2 * own.queries, 2 * own.keys * repeated  # rotated, values, and what attention gives
        norms = 0
        how = self._shape.family.norms_heads
        if how:
            queries, keys = queries + own.queries, keys + own.keys  # as they came from the projections
            norms = _FLOAT32 * (own.heads + own.kv_heads if how == "each" else 2)
        if self._split.ulysses > 1:
            queries += own.queries  # what attention gives, once more by tokens
        sums = _FLOAT32 * own.heads  # of the scores' exponentials
        inputs = self._inputs(2 if self._shape.family.is_fused else 4)
        return self._norms + inputs + self._number * (queries + keys) + norms + sums

    def _kept_by_dense(self) -> float:
        """Gate, up, the gate's activation and the product with it."""
        inputs = self._inputs(2 if self._shape.family.is_fused else 3)
        return self._norms + inputs + self._number * 4 * self._own.features

    def _kept_by_experts(self, experts: Experts) -> float:
        """Of each expert that a token takes: gate and up, what adapters' first matrices make of the inputs of three
        linear layers, and the result before its weight."""
        numbers = 2 * self._own.expert_features + 3 * self._load.adapting_rank + self._shape.hidden
        of_each = self._number * numbers + (3 if self._spec.ep_of("experts") == 1 else 5) * _INT64
        return self._norms + self._inputs(0) + experts.per_token * of_each + _FLOAT32 * experts.num

    def _inputs(self, num_linears: int) -> float:
        """Of linear layers that are trained, and what adapters' first matrices make of it."""
        return self._number * (self._shape.hidden + num_linears * self._load.adapting_rank)

    def _norm_way_back(self) -> float:
        """In float32: the gradient, a product with it and, of another dtype, the state."""
        states = 2 if self._load.dtype == "float32" else 3
        return _FLOAT32 * states * self._shape.hidden / self._stream_parts

    def _features_way_back(self) -> float:
        """What the norm has kept is gone; its gradient is gathered, and next comes that of the features."""
        gathered = self._shape.hidden * self._number if self._stream_parts > 1 else 0
        # On some processors the sum of two products is not made where the first one lies.
        products = 2 if self._load.dtype == "float32" and not self._is_full else 1
        return gathered + products * self._number * (self._own.features if self._shape.num_dense_layers else 0)

    def _experts_at_work(self) -> float:
        """What they are given, what they give, and that by its weight; of others' tokens, too, where these are sent.

        How many come to a rank is as if experts were chosen equally often.
        """
        experts = self._shape.experts
        if experts is None:
            return 0.0
        pairs = experts.per_token * (2 if self._spec.ep_of("experts") == 1 else 4)
        return self._number * (pairs + 2) * self._shape.hidden + self._stream


def _split(shape: ModelShape, spec: ParallelSpec) -> SequenceSplit:
    own = OwnFeatures.of(shape, spec)
    return SequenceSplit.of(spec.sp, own.heads, own.kv_heads)


def _logits(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """Of a chunk: log-probabilities, a copy of the rows that have a gradient, and where the base is not in float32 that
    gradient and, before, logits in its dtype and as they are cast."""
    rows = min(load.head_chunk_tokens, -(-load.tokens // (spec.sp * spec.tp)))
    numbers = rows * shape.vocab
    casting = 0 if load.dtype == "float32" else load.number_bytes + _FLOAT32
    return numbers * (2 * _FLOAT32 + casting)


def _expert_gradients(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """Of a layer's experts, before they are added up in float32: kernels that take all experts at once give them in the
    numbers of the base."""
    if load.training != "full" or load.dtype == "float32":
        return 0
    own = OwnFeatures.of(shape, spec)
    return load.number_bytes * own.experts * 2 * own.expert_features * shape.hidden


def _window_scores(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """A mask of what some queries see, at a time, and around a ring scores, their mask and their softmax; kernels of 16
    bit numbers on CUDA need neither."""
    if load.dtype != "float32" or shape.window is None or shape.window >= load.longest:
        return 0
    if _split(shape, spec).ring > 1:
        return 3 * _FLOAT32 * MOST_SCORES
    queries = queries_of_mask(shape.window)
    return queries * (queries + shape.window) * (_FLOAT32 + 1)
