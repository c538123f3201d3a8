"""The sequences that sample their next token together, with tensors that are reused while the set stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..logits.noise import uniforms
from ..logits.token_choice import ChosenTokens, SamplingTensors
from ..requests.jobs import SequenceState
from ..requests.sequence_table import SequenceTable
from .batch import adapter_spans
from .logits_processors import LogitsProcessors


class SamplingBatch:
    """The sequences that sample their next token together.

    sequences: at least one; those of the same adapter are adjacent.
    lines: theirs in the table, int64, [n].
    adapter_spans: of their tokens.
    watched: the indices of the sequences whose tokens are checked one by one.
    is_plain: whether all sequences need only tokens and their log-probabilities.
    stops: stop tokens, padded with -1, int64, [n, k]; None if there are none.
    """

    def __init__(
        self, sequences: Sequence[SequenceState], table: SequenceTable, vocab_size: int, device: torch.device
    ) -> None:
        self.sequences = sequences
        self.lines = np.array([sequence.line for sequence in sequences], dtype=np.int64)
        self.adapter_spans = adapter_spans((sequence.job.adapter_id, 1) for sequence in sequences)
        self.choice = SamplingTensors.of(table.settings(self.lines), vocab_size, device)
        self.watched = np.flatnonzero(table.is_watched[self.lines]).tolist()
        stops = table.stops[self.lines]
        self.stops = torch.from_numpy(stops).to(device) if (stops >= 0).any() else None
        is_adjusted = table.is_adjusted[self.lines].any()
        self._processors = LogitsProcessors(sequences, vocab_size, device) if is_adjusted else None
        self.is_plain = not (is_adjusted or self.watched)
        self._table, self._device = table, device

    def noise(self) -> Tensor:
        """Returns the noise for the next token, in [0, 1), [n]."""
        noise = uniforms(self._table.noise_key[self.lines], self._table.length[self.lines])
        return torch.from_numpy(noise).to(self._device)

    def processed(self, logits: Tensor) -> Tensor | None:
        """Returns the logits after the logits processors; None if no sequence has any."""
        return None if self._processors is None else self._processors.apply(logits, self._table)


@dataclass(frozen=True)
class SampledBatch:
    """Holds the next token of each sequence of a sampling batch. logits: the model's, float32, [rows, vocab]."""

    sampling: SamplingBatch
    logits: Tensor
    chosen: ChosenTokens
