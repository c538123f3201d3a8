"""The state of all sequences in flight as arrays, so that a decode step updates them all at once."""

from enum import IntEnum

import numpy as np

from .jobs import MAX_STOP_COLUMNS, NOWHERE, SequenceState
from .token_choice import SamplingSettings

_FEWEST_LINES, _FEWEST_COLUMNS = 16, 64
_NO_TOKEN = -1

# A top_k larger than any vocabulary.
_ANY = 1 << 31


class EndReason(IntEnum):
    """The reason why a sequence ends with its newest token."""

    NOT_YET = 0
    STOP = 1
    LENGTH = 2
    NOT_FINITE = 3
    CONSTRAINT_FAILED = 4


class SequenceTable:
    """One line per sequence. ActiveJobs and rows that repeat a decode step add tokens; others read.

    tokens, logprobs: sampled so far, int32 and float32, [lines, columns]; `count`, int64, [lines], says how many.
    length: number of prompt and sampled tokens.
    newest: the last token, of the prompt or sampled.
    limit: the most tokens to sample.
    noise_key: uint64.
    stops: stop tokens, padded with -1, int64, [lines, k].
    temperature, min_p, top_k, top_p: see SamplingSettings.
    is_watched, is_adjusted: see needs_token_checks and needs_processors of SequenceState.
    """

    def __init__(self) -> None:
        self.tokens = np.zeros((0, _FEWEST_COLUMNS), np.int32)
        self.logprobs = np.zeros((0, _FEWEST_COLUMNS), np.float32)
        self.count = np.zeros(0, np.int64)
        self.length = np.zeros(0, np.int64)
        self.newest = np.zeros(0, np.int64)
        self.limit = np.zeros(0, np.int64)
        self.noise_key = np.zeros(0, np.uint64)
        self.stops = np.zeros((0, 1), np.int64)
        self.temperature = np.zeros(0, np.float32)
        self.min_p = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float32)
        self.is_watched = np.zeros(0, np.bool_)
        self.is_adjusted = np.zeros(0, np.bool_)
        self._free: list[int] = []

    @property
    def num_lines(self) -> int:
        return len(self.count) - len(self._free)

    def add(self, sequence: SequenceState) -> None:
        if not self._free:
            self._add_lines()
        job, num_tokens = sequence.job, len(sequence.tokens)
        stops = job.stop_token_ids if len(job.stop_token_ids) <= MAX_STOP_COLUMNS else ()
        self._widen(num_tokens + 1, len(stops))
        line = sequence.line = self._free.pop()
        self.tokens[line, :num_tokens] = sequence.tokens
        self.logprobs[line, :num_tokens] = sequence.logprobs
        self.count[line] = num_tokens
        self.length[line] = len(job.prompt) + num_tokens
        self.newest[line] = sequence.tokens[-1] if num_tokens else job.prompt[-1]
        self.limit[line] = job.max_new_tokens
        self.noise_key[line] = sequence.noise_key
        self.stops[line] = _NO_TOKEN
        self.stops[line, : len(stops)] = list(stops)
        params = job.spec.params
        self.temperature[line], self.min_p[line] = params.temperature, params.min_p
        self.top_k[line], self.top_p[line] = min(params.top_k, _ANY), params.top_p
        self.is_watched[line], self.is_adjusted[line] = sequence.needs_token_checks, sequence.needs_processors

    def settings(self, lines: np.ndarray) -> SamplingSettings:
        return SamplingSettings(self.temperature[lines], self.min_p[lines], self.top_k[lines], self.top_p[lines])

    def remove(self, sequence: SequenceState) -> None:
        """Copies the sampled tokens to the sequence, and frees its line."""
        self.copy_to(sequence)
        self._free.append(sequence.line)
        sequence.line = NOWHERE

    def copy_to(self, sequence: SequenceState) -> None:
        """Copies the tokens sampled so far to the sequence."""
        assert sequence.line != NOWHERE
        count = self.count[sequence.line]
        sequence.tokens = self.tokens[sequence.line, :count].copy()
        sequence.logprobs = self.logprobs[sequence.line, :count].copy()

    def last_tokens(self, sequence: SequenceState, num: int) -> np.ndarray:
        """Returns the last `num` tokens of prompt and samples, int64, [num]."""
        sampled = self.tokens[sequence.line, : self.count[sequence.line]].astype(np.int64)
        of_prompt = max(0, num - len(sampled))
        return np.concatenate(
            [sequence.job.prompt[len(sequence.job.prompt) - of_prompt :], sampled[max(0, len(sampled) - num) :]]
        )

    def extend(self, lines: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Adds k tokens to each line. None of them may end a sequence.

        Args:
            lines: int64, [n].
            tokens, logprobs: [n, k].
        """
        count, num_new = self.count[lines], tokens.shape[1]
        self._widen(int(count.max()) + num_new, 0)
        columns = count[:, None] + np.arange(num_new)
        self.tokens[lines[:, None], columns] = tokens
        self.logprobs[lines[:, None], columns] = logprobs
        self.newest[lines] = tokens[:, -1]
        self.count[lines] += num_new
        self.length[lines] += num_new

    def append(self, lines: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Adds one token to each line.

        Args:
            lines: int64, [n].
        Returns:
            EndReason values, int64, [n].
        """
        count = self.count[lines]
        self._widen(int(count.max()) + 1, 0)
        self.tokens[lines, count] = tokens
        self.logprobs[lines, count] = logprobs
        self.newest[lines] = tokens
        self.count[lines] = count + 1
        self.length[lines] += 1
        ends = np.where(count + 1 >= self.limit[lines], EndReason.LENGTH, EndReason.NOT_YET)
        ends[(self.stops[lines] == tokens[:, None]).any(axis=1)] = EndReason.STOP
        ends[~np.isfinite(logprobs)] = EndReason.NOT_FINITE
        return ends

    def _add_lines(self) -> None:
        before, after = len(self.count), max(_FEWEST_LINES, 2 * len(self.count))
        columns = [name for name, column in vars(self).items() if isinstance(column, np.ndarray)]
        for name in columns:
            old = getattr(self, name)
            new = np.zeros((after, *old.shape[1:]), old.dtype)
            new[:before] = old
            setattr(self, name, new)
        self._free = list(range(after - 1, before - 1, -1))

    def _widen(self, num_tokens: int, num_stops: int) -> None:
        if num_tokens > self.tokens.shape[1]:
            more = max(num_tokens, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, more)))
        if num_stops > self.stops.shape[1]:
            more = num_stops - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=_NO_TOKEN)
