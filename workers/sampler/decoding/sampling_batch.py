"""Drawing: rows that get their next token together, and what that takes: made once while they stay together."""

from collections.abc import Sequence

import numpy as np
import torch

from ..logits.choice import Choice
from ..requests.jobs import Row
from ..requests.sequence_table import Table
from .batch import runs_of
from .processors import Adjusting


class Drawing:
    """rows: one adapter's after the other's, at least one. lines: int64 [n], theirs in the table.

    runs: of their adapters. adjusting: None where no row is adjusted. watched: the places of the rows that are.
    most_top: the most topk_sample_logprobs of any. stops: int64 [n, k], filled up with -1; None where nobody has any.
    """

    def __init__(self, rows: Sequence[Row], table: Table, vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self.lines = np.array([row.line for row in rows], dtype=np.int64)
        self.runs = runs_of((row.job.adapter_id, 1) for row in rows)
        self.choice = Choice.of(table.settings(self.lines), vocab_size, device)
        self.adjusting = Adjusting(rows, vocab_size, device) if table.is_adjusted[self.lines].any() else None
        self.watched = np.flatnonzero(table.is_watched[self.lines]).tolist()
        self.most_top = max((rows[number].job.request.topk_sample_logprobs for number in self.watched), default=0)
        stops = table.stops[self.lines]
        self.stops = torch.from_numpy(stops).to(device) if (stops >= 0).any() else None

    @property
    def is_plain(self) -> bool:
        """Whether no row asks for more than its tokens and their log-probabilities."""
        return self.adjusting is None and not self.watched
