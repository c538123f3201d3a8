"""Decode steps of a fixed set of sequences, without work per sequence."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...ops.kv_cache import CachedRow, DecodeStep
from ..logits.noise import uniforms
from ..logits.token_choice import ChosenTokens
from ..requests.sequence_table import SequenceTable
from .batch import DecodeBatch
from .sampling_batch import SamplingBatch

# Noise is computed for this many steps at a time.
_STEPS = 16


class DecodeLoop:
    """Consecutive decode steps while no sequence joins, leaves or moves. `write_back` writes the tokens to the table.

    tokens, positions: the input of the next step, int64, [n].
    """

    def __init__(
        self, decoding: DecodeBatch, sampling: SamplingBatch, table: SequenceTable, device: torch.device
    ) -> None:
        self.sampling = sampling
        self._table, self._device = table, device
        self._lines = sampling.lines
        self._steps: Sequence[DecodeStep] = decoding.steps(table)
        self._lengths = table.length[self._lines]
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._noise = torch.empty(0)
        self._most_steps = decoding.steps_until_end(table) if sampling.is_plain else 0
        self.tokens = torch.from_numpy(table.newest[self._lines]).to(device)
        self.positions = torch.from_numpy(self._lengths - 1).to(device)

    @property
    def _num_steps(self) -> int:
        return len(self._tokens)

    def packing(self) -> CachedRow:
        return CachedRow(self._steps, (), None, len(self._lines), ())

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
        self._tokens.append(chosen.tokens)
        self._logprobs.append(chosen.logprobs)
        self.tokens = chosen.tokens
        self.positions += 1
        for step in self._steps:
            step.advance()
        return True

    def write_back(self) -> None:
        if self._tokens:
            tokens, logprobs = torch.stack(self._tokens, dim=1), torch.stack(self._logprobs, dim=1)
            self._table.extend(self._lines, tokens.cpu().numpy(), logprobs.cpu().numpy())
