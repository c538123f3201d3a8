"""Drawing: rows that get their next token together, and what that takes: made once while they stay together."""

from collections.abc import Sequence

import numpy as np
import torch

from .adjusting import Adjusting
from .batch import AdapterRun, runs_of
from .choice import Choice
from .jobs import Row


class Drawing:
    """rows: one adapter's after the other's, at least one. lines: int64 [n], theirs in the table.

    watched: the places of those whose tokens are looked at one by one. most_top: the most topk_sample_logprobs of any.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self.lines = np.array([row.line for row in rows], dtype=np.int64)
        self.runs: list[AdapterRun] = runs_of((row.job.adapter_id, 1) for row in rows)
        self.choice = Choice.of([row.job.request.params for row in rows], vocab_size, device)
        self.adjusting = Adjusting(rows, vocab_size, device)
        self.watched = [number for number, row in enumerate(rows) if row.is_watched]
        self.most_top = max(row.job.request.topk_sample_logprobs for row in rows)
