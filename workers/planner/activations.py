"""Estimates the memory that a pass over a micro-batch needs on a rank of a layout.

Mirrors what fused_decoder.py, activation_checkpointing.py, fused.py, attention.py, experts.py, heads/ and
lora/lora_linear.py keep for the backward pass; tests compare it with real passes. Imports no torch.
"""

from dataclasses import dataclass

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import Experts, ModelShape
from ..shapes.sequence_split import SequenceSplit
from ..shapes.windows import MAX_SCORES, queries_of_mask
from .parameters import OwnFeatures
from .workload import Workload

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class Activations:
    """Bytes for a pass over a micro-batch.

    kept: for the backward pass. working, head: in addition, while the last layer runs, and for the logits of a chunk;
    never both at the same time.
    host: in host memory.
    """

    kept: int
    working: int
    head: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.kept + max(self.working, self.head)


def activations(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Activations:
    """Returns the bytes for the largest micro-batch."""
    tokens = -(-load.tokens // spec.sp)
    of_pass = _BytesPerToken(shape, spec, load)
    at_work = _window_scores(shape, spec, load) + _expert_gradients(shape, spec, load)
    return Activations(
        kept=int(tokens * of_pass.kept()),
        working=int(tokens * of_pass.working()) + at_work,
        head=int(tokens * of_pass.head()) + _logits(shape, spec, load),
        host=int(tokens * of_pass.host()),
    )


class _BytesPerToken:
    """Bytes per token of a rank along sp."""

    def __init__(self, shape: ModelShape, spec: ParallelSpec, load: Workload) -> None:
        self._shape, self._spec, self._load = shape, spec, load
        self._own = OwnFeatures.of(shape, spec)
        self._number = load.number_bytes
        self._is_full = load.training == "full"
        self._stream_parts = spec.tp if load.tp_activations == "sharded" else 1
        # A state of the residual stream, and the inverse of its norm.
        self._stream = (self._number * shape.hidden + _FLOAT32) / self._stream_parts
        # What the norms around attention keep, or those around the feed-forward part.
        self._norms = self._stream * len(shape.family.norms.names) / 2
        self._split = _split(shape, spec)

    def kept(self) -> float:
        """Returns the bytes kept for the backward pass.

        The first sum of the residual stream is the embedding, which only its own gradient needs. The last norm keeps
        one more state, and its result. Cosines and sines, tokens and positions are added.
        """
        shape = self._shape
        rotations = 2 if shape.family.has_local_rope else 1
        rotation = rotations * _FLOAT32 * (shape.head_dim + shape.head_dim // 2) + 4 * _INT64
        embedding = self._stream if self._is_full and self._load.activations == "keep" else 0
        return self._kept_of_layers() + embedding + self._stream + rotation

    def host(self) -> float:
        return self._shape.num_layers * self._input if self._load.activations == "offload" else 0.0

    def working(self) -> float:
        """Returns the bytes needed in addition to the kept ones: by the last layer's experts, or by the backward pass
        through the last norm or the feed-forward part before it."""
        of_layer = self._running_again() + max(self._experts_at_work(), self._stream + self._features_way_back())
        return max(self._stream + self._norm_way_back(), of_layer)

    @property
    def _input(self) -> float:
        """Returns the bytes of a layer's input, the sum of the residual stream."""
        return self._number * self._shape.hidden / self._stream_parts

    def _kept_of_layers(self) -> float:
        shape = self._shape
        if self._load.activations == "recompute":
            return shape.num_layers * self._input
        if self._load.activations == "offload":
            return min(2, shape.num_layers) * self._input  # of the running layer and the next one
        of_layers = shape.num_layers * self._kept_by_attention() + shape.num_dense_layers * self._kept_by_dense()
        if shape.experts:
            of_layers += len(shape.experts.layers) * self._kept_by_experts(shape.experts)
        return of_layers

    def _running_again(self) -> float:
        """Returns the bytes of the recomputed layer that keeps most, with its output and the gradient by that."""
        if self._load.activations == "keep":
            return 0.0
        experts = self._shape.experts
        of_kinds = [self._kept_by_dense()] if self._shape.num_dense_layers else []
        of_kinds += [self._kept_by_experts(experts)] if experts else []
        return self._kept_by_attention() + max(of_kinds) + 2 * self._input

    def head(self) -> float:
        """Returns the bytes of the gradient by the final hidden states of the rows that a rank scores."""
        return self._number * self._shape.hidden / self._spec.tp

    def _kept_by_attention(self) -> float:
        own = self._own
        repeated = max(1.0, self._split.ulysses / own.kv_heads)  # each rank has at least one head
        queries, keys = 2 * own.queries, 2 * own.keys * repeated  # rotated, and values or the output of attention
        norms = 0
        how = self._shape.family.norms_heads
        if how:
            queries, keys = queries + own.queries, keys + own.keys  # the outputs of the projections
            norms = _FLOAT32 * (own.heads + own.kv_heads if how == "each" else 2)
        if self._split.ulysses > 1:
            queries += own.queries  # the output of attention again, by tokens
        sums = _FLOAT32 * own.heads  # of the scores' exponentials
        inputs = self._inputs(2 if self._shape.family.has_fused_projections else 4)
        return self._norms + inputs + self._number * (queries + keys) + norms + sums

    def _kept_by_dense(self) -> float:
        """Returns the bytes of gate, up, the gate's activation, and the product of the two."""
        inputs = self._inputs(2 if self._shape.family.has_fused_projections else 3)
        return self._norms + inputs + self._number * 4 * self._own.features

    def _kept_by_experts(self, experts: Experts) -> float:
        """Returns the bytes for all experts that a token takes: gate and up, the products of adapters' A matrices with
        the inputs of three linear layers, and the expert's output before it is weighted."""
        numbers = 2 * self._own.expert_features + 3 * self._load.effective_lora_rank + self._shape.hidden
        of_each = self._number * numbers + (3 if self._spec.ep_size_of("experts") == 1 else 5) * _INT64
        return self._norms + self._inputs(0) + experts.per_token * of_each + _FLOAT32 * experts.num

    def _inputs(self, num_linears: int) -> float:
        """Returns the bytes of the input of trained linear layers, and of its products with adapters' A matrices."""
        return self._number * (self._shape.hidden + num_linears * self._load.effective_lora_rank)

    def _norm_way_back(self) -> float:
        """Returns the bytes for a norm's backward pass in float32: the gradient, a product with it and, if the base
        model has another dtype, the state."""
        states = 2 if self._load.dtype == "float32" else 3
        return _FLOAT32 * states * self._shape.hidden / self._stream_parts

    def _features_way_back(self) -> float:
        """Returns the bytes for the feed-forward part's backward pass: the gathered gradient, and that by the features.
        What the norm kept is already freed."""
        gathered = self._shape.hidden * self._number if self._stream_parts > 1 else 0
        # On some CPUs the sum of two products is not computed in place of the first one.
        products = 2 if self._load.dtype == "float32" and not self._is_full else 1
        return gathered + products * self._number * (self._own.features if self._shape.num_dense_layers else 0)

    def _experts_at_work(self) -> float:
        """Returns the bytes of the experts' inputs, outputs and weighted outputs, and of other ranks' tokens if these
        are exchanged.

        Assumes that all experts are chosen equally often.
        """
        experts = self._shape.experts
        if experts is None:
            return 0.0
        pairs = experts.per_token * (2 if self._spec.ep_size_of("experts") == 1 else 4)
        return self._number * (pairs + 2) * self._shape.hidden + self._stream


def _split(shape: ModelShape, spec: ParallelSpec) -> SequenceSplit:
    own = OwnFeatures.of(shape, spec)
    return SequenceSplit.of(spec.sp, own.heads, own.kv_heads)


def _logits(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    """Returns the bytes of a chunk: log-probabilities, a copy of the rows that have a gradient and, if the base model
    is not float32, that gradient, or before it the logits in its dtype and their cast."""
    rows = min(load.head_chunk_tokens, -(-load.tokens // (spec.sp * spec.tp)))
    numbers = rows * shape.vocab
    casting = 0 if load.dtype == "float32" else load.number_bytes + _FLOAT32
    return numbers * (2 * _FLOAT32 + casting)


def _expert_gradients(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    """Returns the bytes of the gradients of one layer's experts before they are added in float32. Kernels that process
    all experts together return them in the base model's dtype."""
    if load.training != "full" or load.dtype == "float32":
        return 0
    own = OwnFeatures.of(shape, spec)
    return load.number_bytes * own.experts * 2 * own.expert_features * shape.hidden


def _window_scores(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    """Returns the bytes for sliding windows: the mask of some queries, or with a ring scores, their mask and their
    softmax. CUDA kernels for 16-bit dtypes need neither."""
    if load.dtype != "float32" or shape.window is None or shape.window >= load.longest:
        return 0
    if _split(shape, spec).ring > 1:
        return 3 * _FLOAT32 * MAX_SCORES
    queries = queries_of_mask(shape.window)
    return queries * (queries + shape.window) * (_FLOAT32 + 1)
