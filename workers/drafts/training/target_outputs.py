"""The target's outputs at the tokens of a micro-batch: hidden states that it has just computed, or stored ones of any
form. What a draft learns from them exists only for some tokens at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sequences.target_form import Kept, TargetForm

# Computes the target's logits before their cap from its final hidden states, [m, hidden] -> [m, vocabulary].
TargetLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class StoredOutputs:
    """Outputs in a form that is computed from logits.

    files: tensors by name, [T, width], of which only rows that are used are read.
    places: int64 [n, 2], for each token the number of its file, counted from 1, and its row; file 0 if it has none.
    empty: by name, [0, width], on the device on which outputs are used.
    """

    files: Sequence[Mapping[str, Tensor]]
    places: Tensor
    empty: Kept

    def read(self, places: Tensor) -> dict[str, Tensor]:
        """Reads the outputs at some of `places`; zeros where there is no file."""
        numbers, counts = places[:, 0].cpu().unique_consecutive(return_counts=True)
        runs = list(zip(numbers.tolist(), places[:, 1].cpu().split(counts.tolist()), strict=True))
        found = {}
        for name, empty in self.empty.items():
            zeros = torch.zeros(1, empty.shape[1], dtype=empty.dtype)
            parts = (self.files[i - 1][name][rows] if i else zeros.expand(len(rows), -1) for i, rows in runs)
            found[name] = torch.cat([empty, *(part.to(empty.device, non_blocking=True) for part in parts)])
        return found


@dataclass(frozen=True, eq=False)
class TargetOutputs:
    """The outputs at n tokens.

    hidden: final hidden states, [n, hidden]; anything where an output is stored in another form, None if all are.
    stored: None if no output is stored in another form.
    """

    hidden: Tensor | None
    stored: StoredOutputs | None = None

    def kept(self, tokens: Tensor, form: TargetForm, logits: TargetLogits) -> Kept:
        """Returns what is kept at these tokens, int64 [m]."""
        hidden, stored = self.hidden, self.stored
        if stored is None:
            assert hidden is not None
            return form.kept(logits(hidden[tokens]))
        places = stored.places[tokens]
        kept, computed = stored.read(places), places[:, 0] == 0
        if hidden is not None and bool(computed.any()):
            for name, values in form.kept(logits(hidden[tokens[computed]])).items():
                kept[name][computed] = values
        return kept

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "TargetOutputs":
        """Selects tokens by `function`, or also gathers them from other ranks if none is stored in another form."""
        hidden, stored = self.hidden, self.stored
        if stored is not None:
            stored = StoredOutputs(stored.files, function(stored.places), stored.empty)
        return TargetOutputs(None if hidden is None else function(hidden), stored)

    def exchanged(self, exchange: Callable[[Tensor], Tensor]) -> "TargetOutputs":
        """Exchanges tokens with other ranks, all of which have the same kinds of outputs."""
        hidden, stored = None if self.hidden is None else exchange(self.hidden), self.stored
        if stored is None:
            return TargetOutputs(hidden)
        file = {name: exchange(values) for name, values in stored.read(stored.places).items()}
        has_file = exchange(stored.places[:, :1]).sign()
        places = torch.cat([has_file, torch.arange(len(has_file), device=has_file.device)[:, None]], dim=1)
        return TargetOutputs(hidden, StoredOutputs([file], places, stored.empty))

    @staticmethod
    def join(parts: Sequence[tuple[int, "TargetOutputs"]]) -> "TargetOutputs":
        """Concatenates the first tokens of each part, as many as it is given with. At most one has stored outputs."""
        hidden = _joined([(num, each.hidden) for num, each in parts])
        places = _joined([(num, each.stored and each.stored.places) for num, each in parts])
        stored = next((each.stored for _, each in parts if each.stored is not None), None)
        if stored is not None and places is not None:
            stored = StoredOutputs(stored.files, places, stored.empty)
        return TargetOutputs(hidden, stored)


def _joined(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """Concatenates the first rows of each part, zeros for those that are missing; None if all are."""
    like = next((part for _, part in parts if part is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(num, like.shape[1]) if part is None else part[:num] for num, part in parts])
