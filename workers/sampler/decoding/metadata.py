"""The sequences that sample their next token together, with tensors that are reused while the set stays the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..logits.token_choice import ChosenTokens, SamplingTensors
from ..requests.jobs import SequenceState
from ..requests.sequence_table import SequenceTable
from .logits_processors import LogitsProcessors


@dataclass(frozen=True)
class AdapterSpan:
    """Adjacent tokens of the packed row, or rows of logits, of one adapter."""

    adapter_id: str | None
    length: int


def adapter_spans(lengths: Iterable[tuple[str | None, int]]) -> list[AdapterSpan]:
    """Merges adjacent lengths of the same adapter."""
    return [
        AdapterSpan(adapter_id, sum(length for _, length in part))
        for adapter_id, part in groupby(lengths, key=lambda pair: pair[0])
    ]


class SamplingMetadata:
    """The parameters by which sequences, at least one, sample their next token; those of an adapter are adjacent."""

    def __init__(
        self, sequences: Sequence[SequenceState], table: SequenceTable, vocab_size: int, device: torch.device
    ) -> None:
        self.sequences = sequences
        self.lines = np.array([sequence.line for sequence in sequences], dtype=np.int64)
        """Theirs in the table, int64, [n]."""
        self.adapter_spans = adapter_spans((sequence.job.adapter_id, 1) for sequence in sequences)
        self.choice = SamplingTensors.of(table.settings(self.lines), vocab_size, device)
        self.watched = np.flatnonzero(table.is_watched[self.lines]).tolist()
        """The indices of the sequences whose tokens are checked one by one."""
        stops = table.stops[self.lines]
        self.stops = torch.from_numpy(stops).to(device) if (stops >= 0).any() else None
        """Stop tokens, padded with -1, int64, [n, k]."""
        is_adjusted = table.is_adjusted[self.lines].any()
        self._processors = LogitsProcessors(sequences, vocab_size, device) if is_adjusted else None
        self._table = table

    def processed(self, logits: Tensor) -> Tensor | None:
        """Returns the logits after the logits processors; None if no sequence has any."""
        return None if self._processors is None else self._processors.apply(logits, self._table)


@dataclass(frozen=True)
class SampledTokens:
    """The next token of each of these sequences."""

    metadata: SamplingMetadata
    logits: Tensor
    """The model's, float32, [n, vocab]."""
    chosen: ChosenTokens

    def stops_any(self) -> bool:
        """True if any of them is a stop token that the table knows."""
        stops = self.metadata.stops
        return stops is not None and bool((self.chosen.tokens[:, None] == stops).any())
