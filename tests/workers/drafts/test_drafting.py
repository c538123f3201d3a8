"""Batched EAGLE-3 draft steps with a cache equal single rollouts and the training pass."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from trainhouse.workers.drafts.algorithms.eagle3 import Eagle3
from trainhouse.workers.ops.attention import AttentionKind

from .eagle3_case import HEADS, Case, TargetSequence, naively_trained, some_case, trained

LENGTHS = (5, 2, 9, 5)
DEPTH = 4


@dataclass
class Cache:
    """rows: of a step, by sequence. keys, values: of the steps before, by sequence."""

    rows: list[slice] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    longest = max(LENGTHS)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        outs = []
        for number, rows in enumerate(self.rows):
            keys = self.keys[number] = torch.cat([self.keys.get(number, key[:0]), key[rows]])
            values = self.values[number] = torch.cat([self.values.get(number, value[:0]), value[rows]])
            outs.append(self._causal(query[rows], keys, values, kind))
        return torch.cat(outs)

    def _causal(self, query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
        keys, values = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * kind.scaling
        last = torch.arange(len(query)) + len(keys) - len(query)
        hidden = torch.arange(len(keys)) > last[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def drafted(case: Case, sequences: list[TargetSequence], anchors: list[int], later: int = 0) -> list[list[Tensor]]:
    """Returns, for each sequence, the output head's input for each guess after its anchor; all sequences step together.

    Args:
        later: how many positions too late guesses are rotated.
    """
    network, cache = Eagle3().network(case.shape, case.parameters, case.vocabulary), Cache()
    captured = [sequence.captured[: anchor + 1] for sequence, anchor in zip(sequences, anchors, strict=True)]
    embedded = [sequence.embedded[1 : anchor + 2] for sequence, anchor in zip(sequences, anchors, strict=True)]
    positions = [torch.arange(anchor + 1) for anchor in anchors]
    state, found = network._initial_state(torch.cat(captured)), []
    for guess in range(DEPTH):
        lengths = [len(each) for each in positions]
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        cache.rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        state, read = network._step(state, torch.cat(embedded), torch.cat(positions), cache)
        last = torch.tensor(starts[1:]) - 1
        found.append(read[last])
        state = state[last]
        # Past the end of a sequence any token will do.
        embedded = [
            sequence.embedded[[min(anchor + 2 + guess, len(sequence) - 1)]]
            for sequence, anchor in zip(sequences, anchors, strict=True)
        ]
        positions = [torch.tensor([anchor + 1 + guess + later]) for anchor in anchors]
    return [[step[number] for step in found] for number in range(len(sequences))]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_batched_steps_equal_rollouts_and_training(kv_heads: int) -> None:
    case = some_case(kv_heads)
    sequences = case.sequences(LENGTHS)
    for anchors in ([3, 0, 7, 0], [0, 0, 4, 2]):
        found = drafted(case, sequences, anchors)
        for sequence, anchor, steps in zip(sequences, anchors, found, strict=True):
            wanted = _states(case, sequence, anchor)
            assert wanted
            for mine, others in zip(steps, wanted, strict=False):
                assert all(float((mine - other).abs().max()) < 1e-9 for other in others)


def test_wrong_positions_change_the_states() -> None:
    case = some_case()
    sequences = case.sequences(LENGTHS)
    found = drafted(case, sequences, [3, 0, 3, 0], later=1)[2]
    wanted = _states(case, sequences[2], 3)
    assert float((found[0] - wanted[0][0]).abs().max()) < 1e-9
    assert float((found[1] - wanted[1][0]).abs().max()) > 1e-4


def _states(case: Case, sequence: TargetSequence, anchor: int) -> list[tuple[Tensor, Tensor]]:
    """Returns each guess's state after the anchor, from a rollout and from an unrolled pass."""
    both = [way(case, [sequence], DEPTH).states for way in (naively_trained, trained)]
    sizes = [max(0, len(sequence) - 1 - guess) for guess in range(DEPTH)]
    by_guess = zip(*(states.split(sizes) for states in both), strict=True)
    return [(one[anchor], other[anchor]) for one, other in by_guess if anchor < len(one)]
