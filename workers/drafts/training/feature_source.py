"""Sources of the target's features for draft training: a forward pass of the target with hooks, or features captured
earlier.

Both give the same numbers, bit for bit, if the target ran over the same sequences together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...batch.micro_batch import MicroBatch
from ...lora import LoraLayers, Segment
from ...lora.segment import clip_segments
from ...models.fused_decoder import EMBEDDING
from ...models.model import BaseModel
from ...parallel.token_shard import TokenShard
from ...shapes.draft_sizes import CAPTURED
from ..model.draft_model import DraftModel
from ..sequences.captured_features import CapturedFeatures, FeatureKind
from ..sequences.target_form import HIDDEN_STATE, Kept
from .target_outputs import StoredOutputs, TargetLogits, TargetOutputs


@dataclass(frozen=True, eq=False)
class TargetFeatures:
    """Everything that a draft reads of its target at n tokens.

    embedded: [n, hidden], the input of the first layer.
    captured: [n, layers * hidden], the outputs of the captured layers.
    outputs: None if the draft does not learn from the target's distribution.
    """

    embedded: Tensor
    captured: Tensor
    outputs: TargetOutputs | None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "TargetFeatures":
        outputs = None if self.outputs is None else self.outputs.mapped(function)
        return TargetFeatures(function(self.embedded), function(self.captured), outputs)

    def exchanged(self, exchange: Callable[[Tensor], Tensor]) -> "TargetFeatures":
        outputs = None if self.outputs is None else self.outputs.exchanged(exchange)
        return TargetFeatures(exchange(self.embedded), exchange(self.captured), outputs)

    def stored(self, tokens: slice, kind: FeatureKind, logits: TargetLogits, chunk_tokens: int) -> Iterator[Kept]:
        """Yields the tensors to store for these tokens, chunk by chunk. The embedding is frozen and need not be stored.

        Args:
            chunk_tokens: the most tokens whose logits exist at a time.
        """
        hidden = None if self.outputs is None else self.outputs.hidden
        if not kind.stores_logits:
            yield {CAPTURED: self.captured[tokens]} | ({} if hidden is None else {HIDDEN_STATE: hidden[tokens]})
            return
        assert hidden is not None and kind.form is not None
        for start in range(tokens.start, tokens.stop, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, tokens.stop))
            yield {CAPTURED: self.captured[chunk], **kind.form.kept(logits(hidden[chunk]))}

    @staticmethod
    def join(parts: Sequence[tuple[Tensor, "TargetFeatures"]]) -> "TargetFeatures":
        """Joins parts, each with the int64 rows of the whole that it covers; its rows beyond these are padding."""
        order = torch.cat([rows for rows, _ in parts]).argsort()
        embedded, captured = (
            torch.cat([getattr(part, name)[: len(rows)] for rows, part in parts])[order]
            for name in ("embedded", "captured")
        )
        outputs = [(len(rows), part.outputs) for rows, part in parts if part.outputs is not None]
        joined = TargetOutputs.join(outputs).mapped(lambda each: each[order]) if outputs else None
        return TargetFeatures(embedded, captured, joined)


class HookedTarget:
    """Runs the draft's target, without gradients. All ranks call this together, each with its own micro-batch."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraLayers,
        draft: DraftModel,
        shard_of: Callable[[MicroBatch], TokenShard | None],
    ) -> None:
        self._base, self._lora, self._draft, self._shard_of = base, lora, draft, shard_of

    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        shard, own = self._shard_of(micro_batch), self.own(micro_batch)
        return own if shard is None else own.mapped(shard.joined)

    @torch.no_grad()
    def own(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Returns the features of the tokens that this rank scores."""
        layers, shard = self._draft.capture_layers, self._shard_of(micro_batch)
        segments = [Segment(0, len(micro_batch.tokens), self._draft)]
        if shard is not None:
            if shard.num_padding:
                segments.append(Segment(shard.num_tokens, shard.num_padded, None))
            segments = clip_segments(segments, shard.tokens)
        captured: dict[int, Tensor] = dict.fromkeys((EMBEDDING, *layers), torch.empty(0))
        with self._lora.applied(segments):
            last = self._base.shared_hidden_states(micro_batch, shard, captured=captured)
        of_layers = torch.cat([captured[layer] for layer in layers], dim=-1)
        outputs = None if self._draft.target_form is None else TargetOutputs(last)
        features = TargetFeatures(captured[EMBEDDING], of_layers, outputs)
        return features if shard is None else features.mapped(shard.select_scored)


@torch.no_grad()
def stored_features(
    base: BaseModel, draft: DraftModel, stored: Sequence[CapturedFeatures], micro_batch: MicroBatch
) -> TargetFeatures:
    """Reads captured features. stored: those of the micro-batch's sequences, in their order."""
    embedded, kind = base.embedded(micro_batch.tokens), draft.feature_kind
    empty = {
        name: embedded.new_empty(0, column.width, dtype=kind.dtype_of(column)) for name, column in kind.columns.items()
    }
    captured = _read(stored, CAPTURED, empty[CAPTURED])
    if kind.form is None:
        return TargetFeatures(embedded, captured, None)
    if not kind.form.stores_logits:
        hidden = _read(stored, HIDDEN_STATE, empty[HIDDEN_STATE])
        return TargetFeatures(embedded, captured, TargetOutputs(hidden))
    of_outputs = {name: empty[name] for name in kind.form.columns}
    files = [{name: features.tensor(name) for name in of_outputs} for features in stored]
    places = [
        torch.stack([torch.full((num,), number), torch.arange(num)], dim=1)
        for number, num in enumerate((len(file[next(iter(of_outputs))]) for file in files), 1)
    ]
    whole = torch.cat([torch.empty(0, 2, dtype=torch.int64), *places]).to(embedded.device)
    return TargetFeatures(embedded, captured, TargetOutputs(None, StoredOutputs(files, whole, of_outputs)))


def _read(stored: Sequence[CapturedFeatures], name: str, empty: Tensor) -> Tensor:
    """Reads one tensor of all sequences. `empty` sets device and dtype."""
    tensors = {features.address: features.tensor(name) for features in stored}
    on_device = (tensors[features.address].to(empty.device, non_blocking=True) for features in stored)
    return torch.cat([empty, *on_device])
