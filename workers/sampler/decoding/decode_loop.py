"""Decode steps of a fixed set of sequences, without work per sequence."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...ops.kv_cache import CachedRow, DecodeStep
from ..logits.noise import uniforms
from ..logits.token_choice import ChosenTokens
from ..requests.sequence_table import SequenceTable
from .batch import DecodeBatch
from .sampling_batch import SamplingBatch
from .step_tape import StepTape

# Noise is computed for this many steps at a time.
_STEPS = 16


class DecodeLoop:
    """Consecutive decode steps while no sequence joins, leaves or moves. `write_back` writes the tokens to the table.

    tokens, positions: the input of the next step, int64, [n].
    """

    def __init__(
        self, decoding: DecodeBatch, sampling: SamplingBatch, table: SequenceTable, device: torch.device
    ) -> None:
        self.sampling, self._decoding = sampling, decoding
        self._table, self._device = table, device
        self._lines = sampling.lines
        self._most_steps = decoding.steps_until_end(table) if sampling.is_plain else 0
        self._steps: Sequence[DecodeStep] = decoding.steps(table, 1 + self._most_steps)
        self._num_resizes = _num_resizes(self._steps)
        self._lengths = table.length[self._lines]
        self._num_steps = 0
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._noise = torch.empty(0)
        self._tape: StepTape | None = None
        self._weights: object = None
        self.tokens = torch.from_numpy(table.newest[self._lines]).to(device)
        self.positions = torch.from_numpy(self._lengths - 1).to(device)

    def continues(self, decoding: DecodeBatch) -> bool:
        """True if its next step is that of this batch: since `write_back` nothing else has run or moved the cache."""
        lengths = self._table.length[self._lines]
        return (
            self._decoding is decoding
            and np.array_equal(lengths, self._lengths + self._num_steps)
            and self._num_resizes == _num_resizes(self._steps)
        )

    def packing(self) -> CachedRow:
        return CachedRow(self._steps, (), None, len(self._lines), ())

    def run(self, compute: Callable[[], Tensor], weights: object) -> Tensor:
        """Returns the result of the function for the next step.

        The second step is recorded, and those after it repeat it if they can.

        Args:
            weights: compares equal as long as the weights that the function uses are in the same places.
        """
        if weights != self._weights:
            self._weights, self._tape = weights, None
        if self._tape is not None and self._tape.can_repeat:
            return self._tape.repeat()
        if self._tape is not None or self._num_steps == 0 or self._device.type != "cpu":
            return compute()
        self._tape = StepTape()
        found = self._tape.record(compute)
        self._tape.can_repeat &= all(step.is_steady for step in self._steps)
        return found

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
        self.tokens.copy_(chosen.tokens)
        self.positions += 1
        for step in self._steps:
            step.advance()
        return True

    def write_back(self) -> None:
        if self._tokens:
            tokens, logprobs = torch.stack(self._tokens, dim=1), torch.stack(self._logprobs, dim=1)
            self._table.extend(self._lines, tokens.cpu().numpy(), logprobs.cpu().numpy())
            self._tokens, self._logprobs = [], []


def _num_resizes(steps: Sequence[DecodeStep]) -> list[int]:
    return [step.tensors.num_resizes for step in steps]
