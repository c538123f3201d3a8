"""The parameters by which sequences sample their next token, and the logits processors before it is chosen."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from .requests.jobs import SequenceState
from .requests.sequence_table import SequenceTable
from .requests.token_choice import ChosenTokens, SamplingTensors

_TENANT_SECONDS = 0.25
"""The most processor time of a tenant's masks in one step, which other tenants' samples wait for."""


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


class LogitsProcessors:
    """Processes the logits of sequences that sample together. Sequences without such parameters keep theirs."""

    def __init__(self, sequences: Sequence[SequenceState], vocab_size: int, device: torch.device) -> None:
        self._sequences, self._vocab_size, self._device = sequences, vocab_size, device
        params = [sequence.job.spec.params for sequence in sequences]
        self._biased = [i for i, each in enumerate(params) if each.logit_bias]
        self._repeating = [i for i, each in enumerate(params) if each.repetition_penalty != 1]
        self._counted = [i for i, each in enumerate(params) if each.presence_penalty or each.frequency_penalty]
        self._unfinished = [i for i, each in enumerate(params) if each.min_tokens]
        self._constrained = [i for i, sequence in enumerate(sequences) if sequence.matcher is not None]
        self._params = params

    def apply(self, logits: Tensor, table: SequenceTable) -> Tensor:
        """Returns processed logits, in vLLM's order of processing. Does not change its input.

        Args:
            logits: float32, [rows, vocab].
        """
        logits = logits.clone()
        self._constrain(logits)
        self._add_biases(logits)
        self._forbid_stops(logits, table)
        self._penalize_repetition(logits, table)
        self._penalize_counts(logits, table)
        return logits

    def _constrain(self, logits: Tensor) -> None:
        """Leaves the logits of a sequence as they are if its constraint fails: the sequence ends with this token."""
        spent: dict[str, float] = defaultdict(float)
        for row in self._constrained:
            matcher, tenant_id = self._sequences[row].matcher, self._sequences[row].job.spec.tenant_id
            assert matcher is not None
            if spent[tenant_id] > _TENANT_SECONDS:
                matcher.failure = matcher.failure or (
                    f"the constraints of all samples in flight take more than {_TENANT_SECONDS:g} s for each token:"
                    " simplify them, or send fewer requests at a time"
                )
            if (allowed := matcher.allowed()) is not None:
                logits[row].masked_fill_(torch.from_numpy(~allowed).to(self._device), -torch.inf)
            spent[tenant_id] += matcher.seconds

    def _add_biases(self, logits: Tensor) -> None:
        for row in self._biased:
            ids, values = self._sequences[row].job.biases
            logits[row].index_add_(0, self._tensor(ids), self._tensor(values))

    def _forbid_stops(self, logits: Tensor, table: SequenceTable) -> None:
        """If the constraint allows only stop tokens, they stay allowed and the sample ends early."""
        for row in self._unfinished:
            stops = self._sequences[row].job.stop_ids
            if table.count[self._sequences[row].line] < self._params[row].min_tokens and len(stops):
                kept = logits[row].clone().index_fill_(0, self._tensor(stops), -torch.inf)
                if bool((kept > -torch.inf).any()):
                    logits[row] = kept

    def _penalize_repetition(self, logits: Tensor, table: SequenceTable) -> None:
        for row in self._repeating:
            line = self._sequences[row].line
            sampled = table.tokens[line, : table.count[line]]
            seen = np.union1d(self._sequences[row].job.prompt_vocabulary, sampled)
            ids, penalty = self._tensor(seen), self._params[row].repetition_penalty
            own = logits[row, ids]
            logits[row, ids] = torch.where(own > 0, own / penalty, own * penalty)

    def _penalize_counts(self, logits: Tensor, table: SequenceTable) -> None:
        for row in self._counted:
            line, params = self._sequences[row].line, self._params[row]
            ids, counts = np.unique(table.tokens[line, : table.count[line]], return_counts=True)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            logits[row, self._tensor(ids.astype(np.int64))] -= self._tensor(penalties.astype(np.float32))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
