"""Recurrent states of sequences whose draft tokens have run: computed once it is known how many were accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from ...ops.attention import Packing, pack_lengths
from ...ops.kv_cache import PendingInputs
from ..cache.cache import KVCache
from ..decoding.batch import DraftTokensPart
from ..requests.jobs import SequenceState


@dataclass(frozen=True)
class _Place:
    """The first token of a part among the inputs of a pass, and the tokens that the states in its slot stand for."""

    row: int
    num_known: int


class PendingStates:
    """Advances the states in the slots of sequences over the tokens that stay, after a pass with draft tokens.

    Does nothing for models without recurrences.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._inputs: Sequence[PendingInputs] = ()
        self._places: dict[SequenceState, _Place] = {}

    def begin(self, parts: Sequence[DraftTokensPart], inputs: Sequence[PendingInputs]) -> None:
        """Takes the inputs of a pass.

        Args:
            parts: all those with draft tokens, in the order of the inputs. Some of their sequences may have ended.
        """
        row = 0
        for part in parts if inputs else ():
            if self._cache.slot_of(part.sequence) is not None:
                self._places[part.sequence] = _Place(row, part.start)
            row += part.length
        self._inputs = inputs

    def advance(self, lengths: Mapping[SequenceState, int]) -> None:
        """Computes the states after this many tokens of each sequence. Ignores those that have none pending."""
        counts = {each: lengths[each] - place.num_known for each, place in self._places.items() if each in lengths}
        if counts:
            # Sequences of equal length are one batch.
            self._scan(dict(sorted(counts.items(), key=itemgetter(1))))
            for sequence in counts:
                self.forget(sequence)

    def sequences(self) -> list[SequenceState]:
        """Returns the sequences whose states are pending."""
        return list(self._places)

    def forget(self, sequence: SequenceState) -> None:
        """Leaves the sequence's states as they are. Ignored if it has none pending."""
        self._places.pop(sequence, None)
        if not self._places:
            self._inputs = ()

    def clear(self) -> None:
        self._places, self._inputs = {}, ()

    def _scan(self, counts: Mapping[SequenceState, int]) -> None:
        """Advances the states of each sequence over its first tokens of the pass."""
        firsts = [self._places[sequence].row for sequence in counts]
        rows = [torch.arange(first, first + count) for first, count in zip(firsts, counts.values(), strict=True)]
        slots = [slot for sequence in counts if (slot := self._cache.slot_of(sequence)) is not None]
        packing, own = Packing(pack_lengths(list(counts.values()))), torch.cat(rows)
        for each in self._inputs:
            kind, device = each.op.state, each.inputs[0].device
            before = [slot.tensors.states(kind, device)[slot.index] for slot in slots]
            inputs = [x[own.to(device)] for x in each.inputs]
            _, after = each.op.scan(inputs, packing, torch.stack(before))
            for state, new in zip(before, after, strict=True):
                state.copy_(new)
