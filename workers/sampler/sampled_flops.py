"""Counts the operations that the model needs for what a rank samples.

Draft models, draft tokens that are not accepted, and log-probabilities of prompts are not counted.
"""

from collections.abc import Sequence

import numpy as np

from ..models.model import BaseModel
from ..registry.model_registry import ModelRegistry
from ..shapes.layouts.flops import ModelFlops, OwnFlops
from ..shapes.model_shape import ModelShape
from .decoding.batch import Batch
from .decoding.metadata import AdapterSpan, adapter_spans

_BASE = OwnFlops()


class SampledFlops:
    """Adds up the operations until `take`. Counts none for models whose layers are not declared."""

    def __init__(self, base: BaseModel, models: ModelRegistry) -> None:
        self._of_base = ModelFlops(base.shape) if isinstance(base.shape, ModelShape) else None
        self._models = models
        self._total = 0.0

    def take(self) -> float:
        """Returns the operations since the last call."""
        total, self._total = self._total, 0.0
        return total

    def add(self, spans: Sequence[AdapterSpan], starts: np.ndarray, stops: np.ndarray) -> None:
        """Counts tokens starts:stops of sequences, int64 [n]. spans: of all these tokens."""
        if self._of_base is None:
            return
        self._total += self._of_base.trunk(stops) - self._of_base.trunk(starts)
        self._total += sum(span.length * self._own(span).trunk for span in spans)

    def add_scored(self, spans: Sequence[AdapterSpan]) -> None:
        """Counts the output head for hidden states."""
        if self._of_base is not None:
            self._total += sum(self._of_base.head(span.length, self._own(span)) for span in spans)

    def add_steps(self, spans: Sequence[AdapterSpan], lengths: np.ndarray, num_steps: int) -> None:
        """Counts decode steps of sequences of which so many tokens have run before, int64 [n]."""
        spans = [AdapterSpan(span.adapter_id, num_steps * span.length) for span in spans]
        self.add(spans, lengths, lengths + num_steps)
        self.add_scored(spans)

    def add_batch(self, batch: Batch) -> None:
        """Counts the tokens of a packed row below the head, except for draft tokens."""
        if chunks := [chunk for chunk in batch.chunks if chunk.draft is None]:
            spans = [AdapterSpan(chunk.sequence.job.adapter_id, chunk.length) for chunk in chunks]
            self.add(spans, np.array([chunk.start for chunk in chunks]), np.array([chunk.stop for chunk in chunks]))
        if batch.decoding:
            lengths = batch.table.length[batch.lines]
            self.add(adapter_spans((each.job.adapter_id, 1) for each in batch.decoding), lengths - 1, lengths)

    def _own(self, span: AdapterSpan) -> OwnFlops:
        model = None if span.adapter_id is None else self._models.get(span.adapter_id)
        return _BASE if model is None or model.flops is None else model.flops
