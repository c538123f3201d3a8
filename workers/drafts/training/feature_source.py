"""Sources of the target's features for draft training: a forward pass of the target with hooks, or features captured
earlier.

Both give the same numbers, bit for bit, if the target ran over the same sequences together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...batch.micro_batch import MicroBatch
from ...lora import LoraLayers, Segment
from ...lora.segment import clip_segments
from ...models.fused_decoder import EMBEDDING
from ...models.model import BaseModel
from ...parallel.token_shard import TokenShard
from ..draft_model import DraftModel
from ..sequences.captured_features import CAPTURED, CapturedFeatures, FeatureKind


@dataclass(frozen=True, eq=False)
class TargetFeatures:
    """The target's hidden states at n tokens.

    embedded: [n, hidden], the input of the first layer.
    captured: [n, layers * hidden], the outputs of the captured layers.
    last: [n, hidden], the final hidden states, None if the draft does not learn from the target's distribution.
    """

    embedded: Tensor
    captured: Tensor
    last: Tensor | None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "TargetFeatures":
        last = None if self.last is None else function(self.last)
        return TargetFeatures(function(self.embedded), function(self.captured), last)

    def stored(self, rows: slice, kind: FeatureKind) -> dict[str, Tensor]:
        """Returns the tensors to store for these rows. The embedding is frozen and need not be stored."""
        tensors = {CAPTURED: self.captured[rows]}
        if kind.target_repr is not None:
            assert self.last is not None
            tensors[kind.target_repr] = self.last[rows]
        return tensors

    @staticmethod
    def join(parts: Sequence[tuple[Tensor, "TargetFeatures"]]) -> "TargetFeatures":
        """Joins parts, given with the int64 rows of the whole that each covers. Rows of a part beyond these are
        padding."""
        order = torch.cat([rows for rows, _ in parts]).argsort()

        def joined(tensors: Sequence[Tensor]) -> Tensor:
            own = [tensor[: len(rows)] for tensor, (rows, _) in zip(tensors, parts, strict=True)]
            return torch.cat(own)[order]

        embedded, captured = (joined([getattr(part, name) for _, part in parts]) for name in ("embedded", "captured"))
        lasts = [part.last for _, part in parts if part.last is not None]
        return TargetFeatures(embedded, captured, joined(lasts) if len(lasts) == len(parts) else None)


class FeatureSource(Protocol):
    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Returns the features of a draft's micro-batch. All ranks call this together, each with its own
        micro-batch."""
        ...


class HookedTarget:
    """Runs the draft's target, without gradients."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraLayers,
        draft: DraftModel,
        shard_of: Callable[[MicroBatch], TokenShard],
    ) -> None:
        self._base, self._lora, self._draft, self._shard_of = base, lora, draft, shard_of

    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        shard, own = self._shard_of(micro_batch), self.own(micro_batch)
        return own if shard.is_all else own.mapped(shard.joined)

    @torch.no_grad()
    def own(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Returns the features of the tokens that this rank scores."""
        layers, shard = self._draft.capture_layers, self._shard_of(micro_batch)
        segments = [Segment(0, shard.num_tokens, self._draft)]
        if shard.num_padding:
            segments.append(Segment(shard.num_tokens, shard.num_padded, None))
        captured: dict[int, Tensor] = dict.fromkeys((EMBEDDING, *layers), torch.empty(0))
        with self._lora.applied(clip_segments(segments, shard.tokens)):
            last = self._base.shared_hidden_states(micro_batch, shard, captured)
        of_layers = torch.cat([captured[layer] for layer in layers], dim=-1)
        return TargetFeatures(captured[EMBEDDING], of_layers, last).mapped(shard.select_scored)


class StoredFeatureSource:
    """Reads captured features.

    stored: those of the micro-batch's sequences, in their order.
    """

    def __init__(self, base: BaseModel, draft: DraftModel, stored: Sequence[CapturedFeatures]) -> None:
        self._base, self._draft, self._stored = base, draft, stored

    @torch.no_grad()
    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        embedded, kind = self._base.embedded(micro_batch.tokens), self._draft.feature_kind
        tensors = {name: self._read(name, embedded.new_empty(0, width)) for name, width in kind.widths.items()}
        return TargetFeatures(embedded, tensors[CAPTURED], tensors[kind.target_repr] if kind.target_repr else None)

    def _read(self, name: str, like: Tensor) -> Tensor:
        """Reads one tensor of all sequences. `like` is its empty value, which sets device and dtype."""
        tensors = {each.address: each.tensor(name) for each in self._stored}
        return torch.cat([like, *(tensors[each.address].to(like.device, non_blocking=True) for each in self._stored)])
