"""Counts the parameters of a base model, and a rank's part of them.

Mirrors how tensor_parallel.py and fsdp.py divide weights; tests compare it with them, and with models. Imports no
torch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...protocol.parallel_spec import ParallelSpec
from ..model_shape import ModelShape
from ..parts import Weight
from ..parts.part import Style

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}


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
