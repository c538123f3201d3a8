"""The draft whose training is planned, as far as it determines memory. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ...shapes.draft_sizes import (
    DraftSizes,
    FeatureColumn,
    dflash_shapes,
    eagle3_shapes,
    feature_columns,
    own_shape,
    target_columns,
    token_bytes,
)
from ...shapes.logit_budget import LogitBudget
from ...shapes.model_shape import ModelShape
from ..trainable_memory import aligned
from ..workload import Workload

Algorithm = Literal["eagle3", "dflash"]

_SHAPES = {"eagle3": eagle3_shapes, "dflash": dflash_shapes}

# Vectors are padded to parts of whole blocks of 8-bit moments.
_BLOCK = 256


@dataclass(frozen=True)
class DraftLoad:
    """A draft that a rank trains.

    ttt_length: of eagle3's loss. block_size, num_anchors: of dflash. budget: of a chunk of logits. target_top_k: of the
    form of captured features with fewest logits. stored: what its form stores of the target's output, by name; nothing
    if that is hidden states.
    """

    algorithm: Algorithm
    sizes: DraftSizes
    budget: LogitBudget
    ttt_length: int = 7
    block_size: int = 16
    num_anchors: int = 512
    target_top_k: int = 64
    stored: Mapping[str, FeatureColumn] = field(default_factory=dict[str, FeatureColumn])

    def shapes(self, tp: int = 1) -> Mapping[str, tuple[int, ...]]:
        return {name: own_shape(name, shape, tp) for name, shape in _SHAPES[self.algorithm](self.sizes).items()}

    def vector_size(self, tp: int, num_shards: int) -> int:
        """Returns the size of a rank's flat vector, in as many equal parts as there are shards."""
        size = sum(aligned(prod(shape)) for shape in self.shapes(tp).values())
        multiple = num_shards * _BLOCK if num_shards * tp > 1 else 1
        return -(-size // multiple) * multiple

    def captured_bytes(self, number_bytes: int) -> Mapping[str, int]:
        """Returns the bytes of captured features, of one token, by the form of the target's distribution."""
        sizes, vocab_size = self.sizes, self.sizes.target_vocabulary
        forms: dict[str, tuple[str, int | None]] = {"hidden_state": ("hidden_state", None), "logits": ("logits", None)}
        if sizes.vocabulary < vocab_size:
            forms[f"pruned_logits, {sizes.vocabulary} tokens"] = ("pruned_logits", None)
        forms[f"pruned_logits, top {self.target_top_k}"] = ("pruned_logits", self.target_top_k)
        targets = {
            name: target_columns(target_repr, sizes.hidden, vocab_size, sizes.vocabulary, top_k)
            for name, (target_repr, top_k) in forms.items()
        }
        if self.algorithm == "dflash":
            targets = {"without the target's distribution": {}}
        return {
            name: token_bytes(feature_columns(sizes.captured, sizes.hidden, columns), number_bytes)
            for name, columns in targets.items()
        }


def draft_load(
    shape: ModelShape,
    algorithm: Algorithm,
    fields: Mapping[str, int],
    load: Workload,
    is_cpu: bool = False,
    target_repr: str = "hidden_state",
) -> DraftLoad:
    """Returns the draft of a target with these fields, and defaults for others.

    Args:
        fields: of the draft and of its loss, by name; capture_layers is their number.
        target_repr: the form in which an eagle3 draft reads its target's distribution.
    Raises:
        ValueError: the target cannot have such a draft.
    """
    attention = shape.attentions[0] if shape.attentions else None
    if attention is None or attention.head_features is None:
        raise ValueError(f"drafts of {shape.name} are not planned: its first attention is not softmax attention")
    intermediate = fields.get("intermediate_size", shape.intermediate_size)
    if intermediate is None:
        raise ValueError(
            f"the config.json of {shape.name} has no intermediate_size: give the draft's, as in --draft "
            f"{algorithm},intermediate_size=4096"
        )
    layers = fields.get("num_layers", 1)
    sizes = DraftSizes(
        hidden=shape.hidden,
        intermediate=intermediate,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_features,
        layers=layers,
        captured=fields.get("capture_layers", _num_captured(algorithm, layers, shape.num_layers)),
        vocabulary=fields.get("draft_vocab_size", shape.vocab),
        target_vocabulary=shape.vocab,
    )
    _check(sizes, algorithm, shape)
    others = ("ttt_length", "block_size", "num_anchors", "target_top_k")
    given = {"target_top_k": min(DraftLoad.target_top_k, shape.vocab - 1)}
    given |= {name: fields[name] for name in others if name in fields}
    if given["target_top_k"] >= shape.vocab:
        raise ValueError(
            f"target_top_k is {given['target_top_k']}, and {shape.name} has {shape.vocab} tokens: lower it"
        )
    stored = _stored(sizes, target_repr, fields.get("target_top_k"))
    return DraftLoad(algorithm, sizes, LogitBudget.on(is_cpu, load.head_chunk_tokens), **given, stored=stored)


FIELDS: Mapping[Algorithm, tuple[str, ...]] = {
    "eagle3": ("capture_layers", "draft_vocab_size", "intermediate_size", "ttt_length", "target_top_k"),
    "dflash": ("num_layers", "capture_layers", "intermediate_size", "block_size", "num_anchors"),
}
"""The fields that a plan may set, by algorithm."""


def _stored(sizes: DraftSizes, target_repr: str, top_k: int | None) -> Mapping[str, FeatureColumn]:
    if target_repr == "hidden_state":
        return {}
    if target_repr == "pruned_logits" and top_k is None and sizes.vocabulary == sizes.target_vocabulary:
        raise ValueError("target_repr pruned_logits needs draft_vocab_size or target_top_k: set one")
    return target_columns(target_repr, sizes.hidden, sizes.target_vocabulary, sizes.vocabulary, top_k)


def _num_captured(algorithm: Algorithm, layers: int, num_layers: int) -> int:
    """Returns how many layers of the target a draft captures by default."""
    if algorithm == "eagle3":
        return len({min(1, num_layers - 1), max(0, num_layers // 2 - 1), max(0, num_layers - 4)})
    return min(layers, max(1, num_layers - 3))


def _check(sizes: DraftSizes, algorithm: Algorithm, shape: ModelShape) -> None:
    if sizes.captured > shape.num_layers:
        raise ValueError(f"{algorithm} captures {sizes.captured} layers, and {shape.name} has {shape.num_layers}")
    if sizes.vocabulary > shape.vocab:
        raise ValueError(
            f"draft_vocab_size {sizes.vocabulary} exceeds the vocabulary of {shape.name}, {shape.vocab}: lower it"
        )
