"""Counts the parameters of a base model and of what is trained, and a rank's part of them.

Mirrors how tensor_parallel.py and fsdp.py divide weights; tests compare it with them, and with models. Imports no
torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import ModelShape
from ..shapes.parts import Layer, Weight
from ..shapes.parts.part import Style

# In flat vectors each matrix starts at a multiple of this many numbers.
_ALIGNMENT = 16


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one shape.

    pattern: their names, with * for the layer's index. count: how many they are.
    style: how ranks along tp and ep divide them. own_shape: the part that a rank computes with.
    is_divided: whether some layouts divide them. num_unpacked: how many of them a release does not pack.
    fsdp: the number of parts of own_shape of which a rank keeps one. It gathers the others, or only some rows in the
    case of the embedding.
    """

    pattern: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    count: int = 1
    fsdp: int = 1
    style: Style = "replicate"
    is_divided: bool = False
    num_unpacked: int = 0

    @property
    def is_of_layers(self) -> bool:
        return "*" in self.pattern

    @property
    def is_quantizable(self) -> bool:
        return self.is_divided and len(self.shape) > 1 and not self.pattern.endswith("bias")

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
    of_norm = shape.layers[0].norms.parameters
    last = [_whole(f"model.{shape.family.last_norm}.{name}", shape.hidden) for name in of_norm]
    if not shape.tied_embeddings:
        last.append(_end("lm_head.weight", shape, spec))
    if shape.has_head_bias:
        last.append(_whole("lm_head.bias", shape.vocab))
    embedding = _end(f"model.{shape.family.embedding_name}.weight", shape, spec)
    beside = [_beside(f"model.{name}", size, spec) for name, size in shape.other_weights.items()]
    return [embedding, *beside, *_layer_parameters(shape, spec), *last]


def output_head(table: Sequence[ParameterGroup]) -> ParameterGroup:
    """Returns the output head, which may be the embedding."""
    by_pattern = {each.pattern: each for each in table}
    return by_pattern.get("lm_head.weight") or table[0]


def num_parameters(shape: ModelShape) -> int:
    return sum(each.size for each in parameters(shape, ParallelSpec()))


def _layer_parameters(shape: ModelShape, spec: ParallelSpec) -> Iterator[ParameterGroup]:
    """Yields the parameters of layers, those of equal name and shape as one group."""
    counts: Counter[Weight] = Counter()
    for layer, number in Counter(shape.layers).items():
        for weight in layer.weights():
            counts[weight] += number
    for weight, count in counts.items():
        own, style = weight.own_shape(spec), "replicate"
        if weight.placement is not None and weight.placement.unit not in spec.replicated:
            style = weight.placement.style
        is_gathered = weight.placement is not None and weight.placement.is_gathered
        fsdp = _num_kept_parts(own[0], spec) if is_gathered else 1
        is_divided, num_unpacked = weight.placement is not None, shape.num_unpacked[weight]
        yield ParameterGroup(
            f"model.layers.*.{weight.name}", weight.shape, own, count, fsdp, style, is_divided, num_unpacked
        )


def _whole(pattern: str, *shape: int) -> ParameterGroup:
    return ParameterGroup(pattern, shape, shape)


def _beside(pattern: str, matrix: tuple[int, ...], spec: ParallelSpec) -> ParameterGroup:
    """Returns a parameter of the trunk outside the layers. tp and fsdp divide the rows of embeddings."""
    if not pattern.startswith("model.embed"):
        return _whole(pattern, *matrix)
    num_rows, *others = matrix
    own = num_rows // spec.tp if num_rows % spec.tp == 0 else num_rows
    style = "colwise" if own < num_rows else "replicate"
    return ParameterGroup(pattern, matrix, (own, *others), fsdp=_num_kept_parts(own, spec), style=style)


def _end(pattern: str, shape: ModelShape, spec: ParallelSpec) -> ParameterGroup:
    """Returns the embedding or the output head."""
    matrix = shape.vocab, shape.hidden
    return ParameterGroup(pattern, matrix, matrix, fsdp=_num_kept_parts(shape.vocab, spec))


def _num_kept_parts(rows: int, spec: ParallelSpec) -> int:
    """Returns into how many parts fsdp divides a parameter: 1 if its rows cannot be divided evenly."""
    return spec.num_weight_shards if rows % spec.num_weight_shards == 0 else 1


def adapter_size(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> int:
    """Returns the size of one flat vector of an adapter: this rank's parts of its matrices."""
    return sum(number * _adapter_size(layer, spec, lora_rank) for layer, number in Counter(shape.layers).items())


def _adapter_size(layer: Layer, spec: ParallelSpec, lora_rank: int) -> int:
    pairs = (pair for part in layer.parts for pair in part.adapter_pairs(spec))
    return sum(aligned(lora_rank * features) for pair in pairs for features in pair)


def full_size(shape: ModelShape, spec: ParallelSpec) -> int:
    """Returns the size of one flat vector of a fully fine-tuned model: what a rank keeps of each parameter."""
    return sum(each.count * aligned(each.kept // each.count) for each in parameters(shape, spec))


def value_head_size(shape: ModelShape) -> int:
    """Returns the numbers that a critic's head adds to a flat vector: a weight for each feature, and a bias."""
    return aligned(shape.hidden) + aligned(1)


def aligned(size: int) -> int:
    """Returns the numbers that a matrix of this size takes in a flat vector."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
