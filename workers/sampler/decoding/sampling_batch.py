"""The sequences that sample their next token together, with tensors that are reused while the set stays the same."""

from collections.abc import Sequence

import numpy as np
import torch

from ..logits.token_choice import SamplingTensors
from ..requests.jobs import SequenceState
from ..requests.sequence_table import SequenceTable
from .batch import runs_of
from .logits_processors import LogitsProcessors


class SamplingBatch:
    """rows: at least one; those of the same adapter are adjacent.
    lines: their rows in the table, int64, [n].
    runs: of their adapters.
    processors: None if no sequence needs processed logits.
    watched: the indices of the sequences that need a look at each token.
    most_top: the largest topk_sample_logprobs.
    stops: stop tokens, padded with -1, int64, [n, k]; None if there are none.
    """

    def __init__(
        self, rows: Sequence[SequenceState], table: SequenceTable, vocab_size: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.lines = np.array([row.table_row for row in rows], dtype=np.int64)
        self.runs = runs_of((row.job.adapter_id, 1) for row in rows)
        self.choice = SamplingTensors.of(table.settings(self.lines), vocab_size, device)
        self.processors = LogitsProcessors(rows, vocab_size, device) if table.is_adjusted[self.lines].any() else None
        self.watched = np.flatnonzero(table.is_watched[self.lines]).tolist()
        self.most_top = max((rows[number].job.request.topk_sample_logprobs for number in self.watched), default=0)
        stops = table.stops[self.lines]
        self.stops = torch.from_numpy(stops).to(device) if (stops >= 0).any() else None

    @property
    def is_plain(self) -> bool:
        """True if all sequences need only tokens and their log-probabilities."""
        return self.processors is None and not self.watched
