"""Bytes that a rank of a layout needs, from a model's config alone: its parameters, its adapters, what a pass keeps.

Mirrors the parts of a model that tensor.py shares out, the flat vectors of lora/adapter.py, and what trunk.py, fused.py,
attention.py and lora/linear.py keep for the backward pass; tests compare all of it with the real thing. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .checks import is_ulysses
from .shape import ModelShape
from .spec import ParallelSpec

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}

_FLOAT32 = 4
_INT64 = 8

# Views in an adapter's vectors start at multiples of so many numbers.
_ALIGNMENT = 16

# Gathered weights arrive in one piece, and are copied from there.
_COPIES_OF_GATHERED = 2


@dataclass(frozen=True)
class Load:
    """What a rank does with the base model, as the server's knobs of these names say.

    dtype: of the base. longest: tokens of the longest sequence, which runs alone where it is longer than a micro-batch.
    lora_rank: of all adapters, which adapt what can be adapted of the trunk. samples: whether the rank does, too.
    """

    longest: int
    dtype: str = "bfloat16"
    micro_batch_tokens: int = 4096
    head_chunk_tokens: int = 512
    lora_rank: int = 32
    adapter_slots: int = 64
    kv_cache_bytes: int = 1 << 30
    tp_activations: str = "sharded"
    samples: bool = True

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch."""
        return max(self.micro_batch_tokens, self.longest)

    @property
    def number_bytes(self) -> int:
        return BYTES_PER_NUMBER[self.dtype]


@dataclass(frozen=True)
class Parameters:
    """Parameters of one shape. pattern: of their names, * for the number of a layer. count: how many they are.

    own_shape: of the part that a rank computes with. fsdp: it keeps one of so many parts of that, and gathers the rest.
    """

    pattern: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    count: int = 1
    fsdp: int = 1

    @property
    def size(self) -> int:
        """Numbers, of all of them on all ranks."""
        return self.count * prod(self.shape)

    @property
    def kept(self) -> int:
        """Numbers that a rank keeps."""
        return self.count * prod(self.own_shape) // self.fsdp


@dataclass(frozen=True)
class AdapterBytes:
    """Of all adapters on a device. gradients: of a window, and of an operation under way. copies: in the base's dtype,
    and stacked for the products of a micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.copies


@dataclass(frozen=True)
class Activations:
    """Of a pass over a micro-batch. kept: for the way back. working: what the way back through the last layer takes.
    head: the logits of a chunk; they are gone when the way back begins."""

    kept: int
    working: int
    head: int

    @property
    def total(self) -> int:
        return self.kept + max(self.working, self.head)


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank: of what stays, and of the work that comes in turns.

    training: of a pass, with the layer that is gathered for use. sampling: all layers, gathered. step: the exchange of
    gradients.
    """

    base: int
    adapters: AdapterBytes
    kv_cache: int
    activations: Activations
    gathered: int
    sampling: int
    step: int

    @property
    def work(self) -> int:
        """The most that is needed at a time beside what stays."""
        return max(self.activations.total + self.gathered, self.sampling, self.step)

    @property
    def total(self) -> int:
        return self.base + self.adapters.total + self.kv_cache + self.work


def estimate(shape: ModelShape, spec: ParallelSpec, load: Load) -> Memory:
    """Of the rank that needs most. The layout is one that `check_layout` lets pass."""
    table = parameters(shape, spec)
    adapters = load.adapter_slots * adapter_size(shape, spec, load.lora_rank)
    return Memory(
        base=sum(each.kept for each in table) * load.number_bytes,
        adapters=_adapters(adapters, load),
        kv_cache=load.kv_cache_bytes,
        activations=activations(shape, spec, load),
        gathered=_COPIES_OF_GATHERED * _gathered(table, one_layer=True) * load.number_bytes,
        sampling=_gathered(table, one_layer=False) * load.number_bytes if load.samples else 0,
        step=_FLOAT32 * adapters if spec.num_ranks > 1 else 0,
    )


def kv_cache_tokens(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """That the cache of a rank holds."""
    bytes_per_token = 2 * shape.kv_heads // spec.tp * shape.head_dim * shape.num_layers * load.number_bytes
    return load.kv_cache_bytes // bytes_per_token


# Parameters


def parameters(shape: ModelShape, spec: ParallelSpec) -> list[Parameters]:
    """All of them, in the model's order; a tied head is its embedding."""
    last = [Parameters("model.norm.weight", (shape.hidden,), (shape.hidden,))]
    if not shape.tied:
        last.append(_whole("lm_head.weight", shape.vocab, shape.hidden))
    return [_whole("model.embed_tokens.weight", shape.vocab, shape.hidden), *_layer_parameters(shape, spec), *last]


def num_parameters(shape: ModelShape) -> int:
    return sum(each.size for each in parameters(shape, ParallelSpec()))


def _layer_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[Parameters]:
    yield from _attention_parameters(shape, spec)
    if shape.num_dense_layers:
        yield from _dense_parameters(shape, spec)
    if shape.experts:
        yield from _expert_parameters(shape, spec)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _whole(f"model.layers.*.{norm}.weight", shape.hidden, count=shape.num_layers)


def _attention_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[Parameters]:
    hidden, attention = shape.hidden, "model.layers.*.self_attn"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield _split(f"{attention}.{name}.weight", (size, hidden), 0, spec, shape.num_layers)
        if shape.attention_bias:
            yield _split(f"{attention}.{name}.bias", (size,), 0, spec, shape.num_layers)
    yield _split(f"{attention}.o_proj.weight", (hidden, queries), 1, spec, shape.num_layers)
    if shape.output_bias:
        yield _whole(f"{attention}.o_proj.bias", hidden, count=shape.num_layers)
    if shape.family.norms_heads:
        for name in ("q_norm", "k_norm"):
            yield _whole(f"{attention}.{name}.weight", shape.head_dim, count=shape.num_layers)


def _dense_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[Parameters]:
    hidden, features, count = shape.hidden, shape.intermediate, shape.num_dense_layers
    for name in ("gate_proj", "up_proj"):
        yield _split(f"model.layers.*.mlp.{name}.weight", (features, hidden), 0, spec, count)
        if shape.mlp_bias:
            yield _split(f"model.layers.*.mlp.{name}.bias", (features,), 0, spec, count)
    yield _split("model.layers.*.mlp.down_proj.weight", (hidden, features), 1, spec, count)
    if shape.mlp_bias:
        yield _whole("model.layers.*.mlp.down_proj.bias", hidden, count=count)


def _expert_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[Parameters]:
    experts = shape.experts
    assert experts is not None
    num, features, count = experts.num, experts.intermediate, len(experts.layers)
    yield _whole("model.layers.*.mlp.gate.weight", num, shape.hidden, count=count)
    for name, whole, dim in (
        ("gate_up_proj", (num, 2 * features, shape.hidden), 1),
        ("down_proj", (num, shape.hidden, features), 2),
    ):
        yield _split(f"model.layers.*.mlp.experts.{name}", whole, dim, spec, count, num_ep=spec.ep)


def _whole(pattern: str, *shape: int, count: int = 1) -> Parameters:
    return Parameters(pattern, shape, shape, count)


def _split(
    pattern: str, shape: tuple[int, ...], dim: int, spec: ParallelSpec, count: int, num_ep: int = 1
) -> Parameters:
    """tp has parts of dimension dim, ep of the first; what fsdp cannot divide is whole on all its ranks."""
    parts = [1] * len(shape)
    parts[dim] *= spec.tp
    parts[0] *= num_ep
    own = tuple(size // num for size, num in zip(shape, parts, strict=True))
    is_sharded = len(shape) > 1 and own[0] % spec.fsdp == 0
    return Parameters(pattern, shape, own, count, fsdp=spec.fsdp if is_sharded else 1)


def _gathered(table: list[Parameters], one_layer: bool) -> int:
    """Numbers of those that are gathered for use: of one layer, or of all."""
    return sum(prod(each.own_shape) * (1 if one_layer else each.count) for each in table if each.fsdp > 1)


# Adapters


def adapter_size(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> int:
    """Numbers of one of the vectors of an adapter: the parts of its matrices that a rank has."""
    matrices = (features for linear in _linears(shape, spec) for features in linear)
    return sum(-(-lora_rank * features // _ALIGNMENT) * _ALIGNMENT for features in matrices)


def _linears(shape: ModelShape, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
    """Inputs and outputs on a rank of each linear layer of the trunk."""
    own = _Own.of(shape, spec)
    for _ in range(shape.num_layers):
        yield from ((shape.hidden, own.queries), (shape.hidden, own.keys), (shape.hidden, own.keys))
        yield own.queries, shape.hidden
    for _ in range(shape.num_dense_layers):
        yield from ((shape.hidden, own.features), (shape.hidden, own.features), (own.features, shape.hidden))


def _adapters(numbers: int, load: Load) -> AdapterBytes:
    cast = load.number_bytes if load.number_bytes < _FLOAT32 else 0
    stacked = load.number_bytes if load.adapter_slots > 1 else 0
    return AdapterBytes(
        weights=numbers * _FLOAT32,
        gradients=2 * numbers * _FLOAT32,
        optimizer=2 * numbers * _FLOAT32,
        copies=numbers * (cast + stacked),
    )


# Activations


@dataclass(frozen=True)
class _Own:
    """Features of a token on a rank along tp. queries, keys: of all heads together."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    features: int
    expert_features: int

    @staticmethod
    def of(shape: ModelShape, spec: ParallelSpec) -> "_Own":
        heads, kv_heads = shape.heads // spec.tp, shape.kv_heads // spec.tp
        return _Own(
            heads,
            kv_heads,
            heads * shape.head_dim,
            kv_heads * shape.head_dim,
            shape.intermediate // spec.tp,
            shape.experts.intermediate // spec.tp if shape.experts else 0,
        )


def activations(shape: ModelShape, spec: ParallelSpec, load: Load) -> Activations:
    tokens = -(-load.tokens // spec.sp)
    return Activations(
        kept=int(tokens * kept_per_token(shape, spec, load)),
        working=int(tokens * _working_per_token(shape, spec, load)) + _window_mask(shape, load),
        head=int(tokens * _head_per_token(shape, spec, load)) + _logits(shape, spec, load),
    )


def kept_per_token(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """Bytes of a pass for its way back, by the tokens of an sp rank."""
    num_experts = len(shape.experts.layers) if shape.experts else 0
    of_layers = (
        shape.num_layers * _kept_by_attention(shape, spec, load)
        + shape.num_dense_layers * _kept_by_dense(shape, spec, load)
        + num_experts * _kept_by_experts(shape, spec, load)
    )
    # The first sum of the residual stream is the embedding, which nothing needs again; the last norm keeps one more,
    # and its result. Behind them: cosines and sines, tokens, positions.
    rotation = _FLOAT32 * (shape.head_dim + shape.head_dim // 2) + 4 * _INT64
    return of_layers + _stream(shape, spec, load) + rotation


def _kept_by_attention(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    own, size = _Own.of(shape, spec), load.number_bytes
    repeated = max(1.0, spec.sp / own.kv_heads) if is_ulysses(spec, shape) else 1.0
    queries, keys = 2 * own.queries, 2 * own.keys * repeated  # rotated, values, and what attention gives
    if shape.family.norms_heads:
        queries, keys = queries + own.queries, keys + own.keys  # as they came from the projections
    if spec.sp > 1:
        queries += own.queries  # what attention gives, among these tokens again
    norms = _FLOAT32 * (own.heads + own.kv_heads) if shape.family.norms_heads else 0
    sums = _FLOAT32 * own.heads  # of the scores' exponentials
    inputs = size * (shape.hidden + 4 * load.lora_rank)
    return _stream(shape, spec, load) + inputs + size * (queries + keys) + norms + sums


def _kept_by_dense(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """Gate, up, the gate's activation and the product with it."""
    features = 4 * _Own.of(shape, spec).features
    return _stream(shape, spec, load) + load.number_bytes * (shape.hidden + features + 3 * load.lora_rank)


def _kept_by_experts(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """Of each expert that a token takes: gate and up, the gate's activation, and the result before its weight."""
    experts, own = shape.experts, _Own.of(shape, spec)
    assert experts is not None
    of_each = load.number_bytes * (3 * own.expert_features + shape.hidden) + 4 * _INT64
    return _stream(shape, spec, load) + experts.per_token * of_each + _FLOAT32 * experts.num


def _stream(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """A state of the residual stream, and the inverse of its norm."""
    parts = spec.tp if load.tp_activations == "sharded" else 1
    return (load.number_bytes * shape.hidden + _FLOAT32) / parts


def _working_per_token(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """The result of the last norm, the gradient by it, that by the stream, and the largest of what comes next."""
    states = 3 * _stream(shape, spec, load)
    return states + max(_norm_way_back(shape, spec, load), _last_layer_way_back(shape, spec, load))


def _norm_way_back(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """In float32: the gradient and, of another dtype, the state."""
    parts = spec.tp if load.tp_activations == "sharded" else 1
    return shape.hidden * (_FLOAT32 if load.dtype == "float32" else 2 * _FLOAT32) / parts


def _last_layer_way_back(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    own, size = _Own.of(shape, spec), load.number_bytes
    gathered = shape.hidden * size if spec.tp > 1 and load.tp_activations == "sharded" else 0
    if shape.experts and shape.num_layers - 1 in shape.experts.layers:
        return gathered + 3 * size * experts_per_token(shape) * shape.hidden
    return gathered + size * own.features


def experts_per_token(shape: ModelShape) -> int:
    return shape.experts.per_token if shape.experts else 0


def _head_per_token(shape: ModelShape, spec: ParallelSpec, load: Load) -> float:
    """The last hidden states of the rows that a rank scores, and the gradient by them."""
    return 2 * load.number_bytes * shape.hidden / spec.tp


def _logits(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """Of a chunk: log-probabilities, a copy of the rows that have a gradient, and where the base is not in float32 that
    gradient and, before, logits in its dtype and as they are cast."""
    rows = min(load.head_chunk_tokens, -(-load.tokens // (spec.sp * spec.tp)))
    numbers = rows * shape.vocab
    casting = 0 if load.dtype == "float32" else load.number_bytes + _FLOAT32
    return numbers * (2 * _FLOAT32 + casting)


def _window_mask(shape: ModelShape, load: Load) -> int:
    """Of the longest sequence; kernels of 16 bit numbers on CUDA need none."""
    if load.dtype != "float32" or shape.window is None or shape.window >= load.longest:
        return 0
    return load.longest**2 * (_INT64 + _FLOAT32 + 2)
