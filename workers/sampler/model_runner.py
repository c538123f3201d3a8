"""Runs packed batches of tokens on the base model with their adapters, and samples from the output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..heads import LogprobHead
from ..lora import Adapter, BatchPlan, Segment
from ..models.model import BaseModel
from ..ops.kv_cache import PendingInputs
from ..registry.model_registry import ModelRegistry
from .cache.cache import KVCache
from .decoding.batch import AdapterSpan, Batch
from .decoding.decode_loop import DecodeLoop
from .decoding.rank_sync import RankSync
from .decoding.sampling_batch import SampledBatch, SamplingBatch
from .logits.token_choice import choose
from .requests.sequence_table import SequenceTable


@dataclass(frozen=True)
class PassOutput:
    """The output of a pass.

    hidden: of each token, [tokens, hidden].
    captured: the layers that drafts read, see BaseModel.hidden_states.
    pending: of the parts with draft tokens, see CachedRow.
    """

    hidden: Tensor
    captured: Mapping[int, Tensor]
    pending: Sequence[PendingInputs]


class ModelRunner:
    """Keeps the plan of the last batch's adapters, for batches of the same ones."""

    def __init__(
        self, base: BaseModel, models: ModelRegistry, head: LogprobHead, ranks: RankSync, cache: KVCache
    ) -> None:
        self._base, self._models, self._head, self._ranks, self._cache = base, models, head, ranks, cache
        self._plan: BatchPlan | None = None

    def run(self, batch: Batch, table: SequenceTable, captured: dict[int, Tensor] | None) -> PassOutput:
        """Runs the packed row.

        Args:
            captured: the layers to capture, see BaseModel.hidden_states.
        """
        tokens, positions = self.tensor(batch.tokens(table)), self.tensor(batch.positions(table))
        packing = batch.packing(table, self._cache, self._base.device)
        with self.applied(batch.adapter_spans(), batch.num_tokens):
            hidden = self._base.hidden_states(tokens, positions, packing, captured=captured)
        return PassOutput(hidden, captured or {}, packing.pending)

    @contextmanager
    def applied(
        self, spans: Sequence[AdapterSpan], num_tokens: int, plan: BatchPlan | None = None
    ) -> Iterator[BatchPlan]:
        """Applies the adapters, with as many threads as passes of `num_tokens` use best.

        Args:
            plan: an earlier one, which is used if it is valid.
        """
        self._base.threads.set_for(self._base.weights_per_product, num_tokens, self._cache.values_per_layer())
        segments = self._segments(spans)
        known = (each for each in (plan, self._plan) if each is not None and each.is_valid_for(segments))
        self._plan = next(known, None) or self._models.lora.plan(segments, self._plan)
        with self._models.lora.applied(self._plan):
            yield self._plan

    def decode_step(self, loop: DecodeLoop) -> SampledBatch:
        """Runs one step, inside `applied` to its rows, and samples."""
        rows = loop.rows

        def logits() -> Tensor:
            hidden = self._base.hidden_states(rows.tokens, rows.positions, rows.packing())
            return self.logits(hidden, rows.adapter_spans)

        found = rows.run(logits, (rows.plan, self._base.num_moves))
        return self._sample(loop.sampling, found, loop.noise())

    def sample(self, sampling: SamplingBatch, hidden: Tensor, noise: Tensor) -> SampledBatch:
        """Samples the next token of each sequence.

        Args:
            hidden: the hidden state of each, [rows, hidden].
            noise: in [0, 1), [rows].
        """
        return self._sample(sampling, self.logits(hidden, sampling.adapter_spans), noise)

    def _sample(self, sampling: SamplingBatch, logits: Tensor, noise: Tensor) -> SampledBatch:
        chosen = choose(logits, sampling.choice, noise.to(logits.dtype), sampling.processed(logits))
        return SampledBatch(sampling, logits, self._ranks.agree_on_tokens(chosen))

    def logits(self, hidden: Tensor, spans: Sequence[AdapterSpan]) -> Tensor:
        """Returns float32, [n, vocab]."""
        return self._head.logits_of_segments(hidden, self._segments(spans))

    def logits_with(self, adapter_id: str | None) -> Callable[[Tensor], Tensor]:
        """Returns a function from hidden states to the logits with this adapter."""
        model = None if adapter_id is None else self._models.get(adapter_id)
        return partial(self._head.logits, pair=model.unembed if isinstance(model, Adapter) else None)

    def forget_plan(self) -> None:
        """Drops tensors derived from the current weights, and references to the adapters."""
        self._plan = None

    def tensor(self, integers: object) -> Tensor:
        """Returns int64 on the model's device."""
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)

    def _segments(self, spans: Sequence[AdapterSpan]) -> tuple[Segment, ...]:
        segments, start = [], 0
        for span in spans:
            model = None if span.adapter_id is None else self._models.get(span.adapter_id)
            segments.append(Segment(start, start + span.length, model))
            start += span.length
        return tuple(segments)
