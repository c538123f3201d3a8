"""Decode steps of a fixed set of sequences, without work per sequence."""

import numpy as np
import torch
from torch import Tensor

from ..logits.noise import uniforms
from ..logits.token_choice import ChosenTokens
from ..requests.sequence_table import SequenceTable
from .batch import DecodeBatch
from .decode_rows import DecodeRows
from .sampling_batch import SamplingBatch

# Noise is computed for this many steps at a time.
_STEPS = 16


class DecodeLoop:
    """Decode steps while no sequence joins, leaves or moves. `write_back` writes the tokens to the table."""

    def __init__(
        self,
        decoding: DecodeBatch,
        sampling: SamplingBatch,
        table: SequenceTable,
        device: torch.device,
        rows: DecodeRows,
    ) -> None:
        self.sampling, self.rows, self._decoding = sampling, rows, decoding
        self._table, self._device = table, device
        self._lines = sampling.lines
        self._most_steps = int(decoding.steps_left(table).min()) if sampling.is_plain else 0
        self._lengths = table.length[self._lines]
        self._num_steps = 0
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._noise = torch.empty(0)

    def continues(self, decoding: DecodeBatch) -> bool:
        """True if its next step is that of this batch: since `write_back` nothing else has run or moved the cache."""
        lengths = self._table.length[self._lines]
        is_same = self._decoding is decoding and np.array_equal(lengths, self._lengths + self._num_steps)
        return is_same and self.rows.is_current

    def noise(self) -> Tensor:
        """Returns the noise for the next token, float32 in [0, 1), [n]."""
        number = self._num_steps % _STEPS
        if number == 0:
            positions = self._lengths[:, None] + self._num_steps + np.arange(_STEPS)
            drawn = uniforms(self._table.noise_key[self._lines, None], positions)
            self._noise = torch.from_numpy(np.ascontiguousarray(drawn.T)).to(self._device, torch.float32)
        return self._noise[number]

    def accept(self, chosen: ChosenTokens) -> bool:
        """Takes the tokens if another step may follow. Returns False if they were not taken.

        None may follow if a sequence ends, outgrows its slot or needs more than tokens and log-probabilities.
        """
        if self._num_steps >= self._most_steps:
            return False
        stops = self.sampling.stops
        if stops is not None and bool((chosen.tokens[:, None] == stops).any()):
            return False
        if not chosen.are_finite:
            return False
        self._num_steps += 1
        self._tokens.append(chosen.tokens)
        self._logprobs.append(chosen.logprobs)
        self.rows.advance(chosen.tokens)
        return True

    def write_back(self) -> None:
        if self._tokens:
            tokens, logprobs = torch.stack(self._tokens, dim=1), torch.stack(self._logprobs, dim=1)
            self._table.extend(self._lines, tokens.cpu().numpy(), logprobs.cpu().numpy())
            self._tokens, self._logprobs = [], []
