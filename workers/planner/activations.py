"""Estimates the memory that a pass over a micro-batch needs on a rank of a layout.

The parts of layers say what they keep (see ../shapes/parts); this adds the residual stream and the head. Tests compare
it with real passes. Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import ModelShape
from ..shapes.parts import Layer, Share
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
    at_work = of_pass.scores() + _expert_gradients(shape, spec, load)
    return Activations(
        kept=int(tokens * of_pass.kept()),
        # Attention runs backward after the feed-forward part, whose memory is then free.
        working=max(int(tokens * of_pass.working()), of_pass.score_gradients()) + at_work,
        head=int(tokens * of_pass.head()) + _logits(shape, spec, load),
        host=int(tokens * of_pass.host()),
    )


def forward_activations(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Activations:
    """Returns the bytes for the largest micro-batch without a backward pass: of the layer that runs, and of the logits
    of a chunk."""
    tokens = -(-load.tokens // spec.sp)
    of_pass = _BytesPerToken(shape, spec, load)
    return Activations(
        kept=int(tokens * of_pass.kept_forward()),
        working=int(tokens * of_pass.running()) + of_pass.scores(),
        head=_logits(shape, spec, load, has_gradient=False),
    )


def share_of(shape: ModelShape, spec: ParallelSpec, load: Workload) -> Share:
    return Share(
        spec=spec,
        number_bytes=load.number_bytes,
        lora_rank=load.effective_lora_rank,
        is_full=load.training == "full",
        gathers_stream=load.tp_activations == "sharded" and spec.tp > 1,
        longest=load.longest,
        tokens=load.tokens,
        ulysses=shape.sequence_split(spec).ulysses,
        mixes_adapters=load.training == "lora" and load.adapter_slots > 1,
    )


class _BytesPerToken:
    """Bytes per token of a rank along sp."""

    def __init__(self, shape: ModelShape, spec: ParallelSpec, load: Workload) -> None:
        self._shape, self._spec, self._load = shape, spec, load
        self._number = load.number_bytes
        self._is_full = load.training == "full"
        self._stream_parts = spec.tp if load.tp_activations == "sharded" else 1
        # A state of the residual stream, and the inverse of its norm.
        self._stream = (self._number * shape.hidden + _FLOAT32) / self._stream_parts
        self._share = share_of(shape, spec, load)

    def kept(self) -> float:
        """Returns the bytes kept for the backward pass.

        The first sum of the residual stream is the embedding, which only its own gradient needs. The last norm keeps
        one more state, and its result. Cosines and sines, tokens and positions are added.
        """
        embedding = self._stream if self._is_full and self._load.activations == "keep" else 0
        return self._kept_of_layers() + embedding + self._stream + self._positions()

    def kept_forward(self) -> float:
        """Returns the bytes that stay through a pass without a backward pass: the residual stream, with the last
        part's output, which the next norm adds to it."""
        return 2 * self._stream + self._positions()

    def running(self) -> float:
        """Returns the bytes of the part of a layer that needs most in such a pass, with its input and its output."""
        experts = self._shape.experts
        # Experts take a copy of a token each.
        in_order = 0 if experts is None else self._number * experts.per_token * self._shape.hidden
        parts = {part for layer in self._layers for part in layer.parts}
        return 2 * self._stream + max(part.kept_bytes(self._share) for part in parts) + in_order

    def _positions(self) -> int:
        return rotation_bytes(self._shape) + 4 * _INT64

    def host(self) -> float:
        return self._shape.num_layers * self._input if self._load.activations == "offload" else 0.0

    def working(self) -> float:
        """Returns the bytes needed in addition to the kept ones: by the last layer's experts, or by the backward pass
        through the last norm or the feed-forward part before it."""
        at_work = max(self._stream + part.working_bytes(self._share) for layer in self._layers for part in layer.parts)
        return max(self._stream + self._norm_way_back(), self._running_again() + at_work)

    def scores(self) -> int:
        """Returns the bytes of scores, for all tokens together."""
        return max((mixer.score_bytes(self._share) for mixer in self._shape.mixers), default=0)

    def score_gradients(self) -> int:
        return max((mixer.score_gradient_bytes(self._share) for mixer in self._shape.mixers), default=0)

    @property
    def _layers(self) -> Sequence[Layer]:
        return tuple(dict.fromkeys(self._shape.layers))

    @property
    def _input(self) -> float:
        return self._number * self._shape.hidden / self._stream_parts

    def _kept_of_layers(self) -> float:
        shape = self._shape
        if self._load.activations == "recompute":
            return shape.num_layers * self._input + self._kept_beside()
        if self._load.activations == "offload":
            # Inputs of the running layer and of the next one.
            return min(2, shape.num_layers) * self._input + self._kept_beside()
        counts = Counter(shape.layers)
        return sum(count * self._kept_by(layer) for layer, count in counts.items())

    def _kept_beside(self) -> float:
        """Returns the bytes that recomputed layers keep in addition to their inputs from the residual stream."""
        inputs = sum(each.token_input or 0 for each in self._shape.layers) / self._stream_parts
        sources = {source for source in self._shape.sources if source is not None}
        return self._number * inputs + sum(map(self._shared_by, sources))

    def _shared_by(self, source: int) -> float:
        """Returns the bytes of what other layers use of this one: keys and values, and their gradients, or the choice
        of tokens."""
        mixer = self._shape.layers[source].mixer
        assert mixer is not None
        return mixer.shared_bytes(self._share)

    def _kept_by(self, layer: Layer) -> float:
        of_parts = sum(part.kept_bytes(self._share) for part in layer.parts)
        if layer.is_parallel and not self._share.gathers_stream:
            of_parts -= self._number * layer.hidden  # its parts have the same input
        return self._stream * len(layer.norms.names) + of_parts + self._kept_by_end(layer)

    def _kept_by_end(self, layer: Layer) -> float:
        """Returns the bytes of the layer's own input for each token, of its gate, and of the norm after it."""
        if layer.token_input is None:
            return 0.0
        numbers = 3 * layer.token_input
        if self._is_full:  # the projection to its input before its norm, the product with its gate, and its state
            numbers += 2 * layer.token_input + layer.hidden
        return self._stream + self._number * numbers / self._stream_parts

    def _running_again(self) -> float:
        """Returns the bytes of the recomputed layer that keeps most, with its output and the gradient by that."""
        if self._load.activations == "keep":
            return 0.0
        return max(map(self._kept_by, self._layers)) + 2 * self._input

    def head(self) -> float:
        """Returns the bytes of the gradient by the final hidden states of the rows that a rank scores."""
        return self._number * self._shape.hidden / self._spec.tp

    def _norm_way_back(self) -> float:
        """Returns the bytes for a norm's backward pass in float32: the gradient, a product with it and, if the base
        model has another dtype, the state."""
        states = 2 if self._load.dtype == "float32" else 3
        return _FLOAT32 * states * self._shape.hidden / self._stream_parts


def rotation_bytes(shape: ModelShape) -> int:
    """Returns the bytes of a position's cosines and sines, of all kinds of rotations."""
    rotated = {each.rotation: each.rotary_dim for each in shape.attentions if each.rotation is not None}.values()
    return sum(_FLOAT32 * (size + size // 2) for size in rotated)


def _logits(shape: ModelShape, spec: ParallelSpec, load: Workload, has_gradient: bool = True) -> int:
    """Returns the bytes of a chunk: log-probabilities, a copy of the rows that have a gradient and, if the base model
    is not float32, that gradient, or before it the logits in its dtype and their cast."""
    rows = min(load.head_chunk_tokens, -(-load.tokens // (spec.sp * spec.tp)))
    numbers = rows * shape.vocab
    casting = 0 if load.dtype == "float32" else load.number_bytes + _FLOAT32
    return numbers * ((1 + has_gradient) * _FLOAT32 + casting)


def _expert_gradients(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    """Returns the bytes of the gradients of one layer's experts before they are added in float32. Kernels that process
    all experts together return them in the base model's dtype."""
    experts = shape.experts
    if load.training != "full" or load.dtype == "float32" or experts is None:
        return 0
    num_own = experts.num // spec.ep_size_of("experts")
    return load.number_bytes * num_own * 2 * experts.own_features(spec) * shape.hidden
