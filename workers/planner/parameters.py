"""Counts the parameters of a base model and of what is trained, and a rank's part of them.

Mirrors how tensor_parallel.py and fsdp.py divide weights; tests compare it with them, and with models. Imports no
torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import ModelShape
from ..shapes.styles import Style, placement_of

# In flat vectors each matrix starts at a multiple of this many numbers.
_ALIGNMENT = 16


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one shape.

    pattern: their names, with * for the layer's index. count: how many they are.
    style: how ranks along tp and ep divide them. own_shape: the part that a rank computes with.
    fsdp: the number of parts of own_shape of which a rank keeps one. It gathers the others, or only some rows in the
    case of the embedding.
    """

    pattern: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    count: int = 1
    fsdp: int = 1
    style: Style = "replicate"

    @property
    def is_of_layers(self) -> bool:
        return "*" in self.pattern

    @property
    def size(self) -> int:
        """Returns how many numbers they have on all ranks."""
        return self.count * prod(self.shape)

    @property
    def kept(self) -> int:
        """Returns how many numbers a rank keeps."""
        return self.count * prod(self.own_shape) // self.fsdp


def parameters(shape: ModelShape, spec: ParallelSpec) -> list[ParameterGroup]:
    """Returns all parameters in the model's order. A tied head appears only as the embedding."""
    last = [_whole("model.norm.weight", shape.hidden)]
    if not shape.tied_embeddings:
        last.append(_end("lm_head.weight", shape, spec))
    return [_end("model.embed_tokens.weight", shape, spec), *_layer_parameters(shape, spec), *last]


def output_head(table: Sequence[ParameterGroup]) -> ParameterGroup:
    """Returns the output head, which may be the embedding."""
    by_pattern = {each.pattern: each for each in table}
    return by_pattern.get("lm_head.weight") or by_pattern["model.embed_tokens.weight"]


def num_parameters(shape: ModelShape) -> int:
    return sum(each.size for each in parameters(shape, ParallelSpec()))


def _layer_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[ParameterGroup]:
    yield from _attention_parameters(shape, spec)
    if shape.num_dense_layers:
        yield from _dense_parameters(shape, spec)
    if shape.experts:
        yield from _expert_parameters(shape, spec)
    for norm in shape.family.norms.names:
        yield _whole(f"model.layers.*.{norm}.weight", shape.hidden, count=shape.num_layers)


def _attention_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[ParameterGroup]:
    hidden, attention = shape.hidden, "model.layers.*.self_attn"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    apart = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    for name, size in (("qkv_proj", queries + 2 * keys),) if shape.family.has_fused_projections else apart:
        yield _shared(f"{attention}.{name}.weight", (size, hidden), spec, shape.num_layers)
        if shape.attention_bias:
            yield _shared(f"{attention}.{name}.bias", (size,), spec, shape.num_layers)
    yield _shared(f"{attention}.o_proj.weight", (hidden, queries), spec, shape.num_layers)
    if shape.output_bias:
        yield _whole(f"{attention}.o_proj.bias", hidden, count=shape.num_layers)
    if shape.family.norms_heads:
        together = shape.family.norms_heads == "together"
        for name, size in (("q_norm", queries), ("k_norm", keys)):
            yield _whole(f"{attention}.{name}.weight", size if together else shape.head_dim, count=shape.num_layers)


def _dense_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[ParameterGroup]:
    hidden, features, count = shape.hidden, shape.intermediate, shape.num_dense_layers
    apart = (("gate_proj", features), ("up_proj", features))
    for name, size in (("gate_up_proj", 2 * features),) if shape.family.has_fused_projections else apart:
        yield _shared(f"model.layers.*.mlp.{name}.weight", (size, hidden), spec, count)
        if shape.mlp_bias:
            yield _shared(f"model.layers.*.mlp.{name}.bias", (size,), spec, count)
    yield _shared("model.layers.*.mlp.down_proj.weight", (hidden, features), spec, count)
    if shape.mlp_bias:
        yield _whole("model.layers.*.mlp.down_proj.bias", hidden, count=count)


def _expert_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[ParameterGroup]:
    experts = shape.experts
    assert experts is not None
    num, features, count = experts.num, experts.intermediate, len(experts.layers)
    yield _whole("model.layers.*.mlp.gate.weight", num, shape.hidden, count=count)
    yield _shared("model.layers.*.mlp.experts.gate_up_proj", (num, 2 * features, shape.hidden), spec, count)
    yield _shared("model.layers.*.mlp.experts.down_proj", (num, shape.hidden, features), spec, count)


def _whole(pattern: str, *shape: int, count: int = 1) -> ParameterGroup:
    return ParameterGroup(pattern, shape, shape, count)


def _end(pattern: str, shape: ModelShape, spec: ParallelSpec) -> ParameterGroup:
    """Returns the embedding or the output head."""
    matrix = shape.vocab, shape.hidden
    return ParameterGroup(pattern, matrix, matrix, fsdp=_num_kept_parts(shape.vocab, spec))


def _num_kept_parts(rows: int, spec: ParallelSpec) -> int:
    """Returns into how many parts fsdp divides a parameter: 1 if its rows cannot be divided evenly."""
    return spec.num_weight_shards if rows % spec.num_weight_shards == 0 else 1


def _shared(pattern: str, shape: tuple[int, ...], spec: ParallelSpec, count: int) -> ParameterGroup:
    placement = placement_of(pattern.removeprefix("model."))
    assert placement is not None, pattern
    unit, parts = placement.unit, [1] * len(shape)
    parts[placement.dim] *= spec.tp_size_of(unit)
    parts[0] *= spec.ep_size_of(unit)
    own = tuple(size // num for size, num in zip(shape, parts, strict=True))
    style = "replicate" if unit in spec.replicated else placement.style
    return ParameterGroup(pattern, shape, own, count, fsdp=_num_kept_parts(own[0], spec), style=style)


def adapter_size(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> int:
    """Returns the size of one flat vector of an adapter: this rank's parts of its matrices."""
    matrices = (features for linear in _linears(shape, spec) for features in linear)
    return sum(_aligned(lora_rank * features) for features in matrices)


def full_size(shape: ModelShape, spec: ParallelSpec) -> int:
    """Returns the size of one flat vector of a fully fine-tuned model: what a rank keeps of each parameter."""
    return sum(each.count * _aligned(each.kept // each.count) for each in parameters(shape, spec))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _linears(shape: ModelShape, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
    """Yields a rank's numbers of inputs and outputs of each adapted linear layer; those of its experts are summed."""
    own, is_fused = OwnFeatures.of(shape, spec), shape.family.has_fused_projections
    for _ in range(shape.num_layers):
        of_heads = own.queries, own.keys, own.keys
        yield from ((shape.hidden, size) for size in ((sum(of_heads),) if is_fused else of_heads))
        yield own.queries, shape.hidden
    for _ in range(shape.num_dense_layers):
        yield from ((shape.hidden, size) for size in ([2 * own.features] if is_fused else [own.features] * 2))
        yield own.features, shape.hidden
    for _ in shape.experts.layers if shape.experts else ():
        hidden, features = own.experts * shape.hidden, own.experts * own.expert_features
        yield from ((hidden, features), (hidden, features), (features, hidden))


@dataclass(frozen=True)
class OwnFeatures:
    """The features per token of a rank along tp.

    queries, keys: of all its heads together. experts: the number of experts on a rank along ep.
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    features: int
    expert_features: int
    experts: int

    @staticmethod
    def of(shape: ModelShape, spec: ParallelSpec) -> "OwnFeatures":
        tp_of_heads, tp_of_experts = spec.tp_size_of("self_attn"), spec.tp_size_of("experts")
        heads, kv_heads = shape.heads // tp_of_heads, shape.kv_heads // tp_of_heads
        return OwnFeatures(
            heads,
            kv_heads,
            heads * shape.head_dim,
            kv_heads * shape.head_dim,
            shape.intermediate // spec.tp_size_of("mlp"),
            shape.experts.intermediate // tp_of_experts if shape.experts else 0,
            shape.experts.num // spec.ep_size_of("experts") if shape.experts else 0,
        )
