"""Drafting with a cache, many sequences at once, equals drafting one sequence without a cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import Algorithm
from trainhouse.workers.drafts.algorithms.dflash import DFlash
from trainhouse.workers.drafts.sequences.drafting import TargetStates
from trainhouse.workers.ops.kv_cache import ContinuationChunk, SlotTensors

from .case import ALGORITHMS, Case, TargetSequence, new_case, target_sequences
from .naive import NAIVE

LENGTHS, OBSERVED = (9, 6, 11, 11, 14), (5, 1, 7, 3, 10)
with_each_case = pytest.mark.parametrize(
    "case",
    [new_case(name, kv_heads=kv_heads) for name in ALGORITHMS for kv_heads in (1, 4)],
    ids=lambda case: f"{case.algorithm}-{case.shape.kv_heads}",
)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Ends:
    """Stands in for TargetEnds."""

    case: Case

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.case.embedding[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.case.head is not None
        return self.case.head.logits(hidden)


@dataclass
class Drafted:
    """Gives each sequence a cache slot, and counts how many of its tokens the draft has observed.

    later: offset in tokens of the features that it gets, 0 if they are right.
    """

    case: Case
    sequences: Sequence[TargetSequence]
    later: int = 0
    states: type[TargetStates] = TargetStates
    tensors: SlotTensors = field(default_factory=lambda: SlotTensors(32))

    def __post_init__(self) -> None:
        self.network = self.case.network(self.case.parameters)
        self.tensors.resize(len(self.sequences))
        self.num_observed = [0] * len(self.sequences)

    def observe(self, counts: Sequence[int]) -> TargetStates:
        """Returns the features of each sequence's first tokens that are new to the draft."""
        chunks: list[ContinuationChunk] = []
        start = 0
        parts = [slice(first, stop) for first, stop in zip(self.num_observed, counts, strict=True)]
        for slot, part in enumerate(parts):
            stop = start + part.stop - part.start
            chunks.append(ContinuationChunk(start, stop, self.tensors, slot, part.start))
            start = stop
        self.num_observed = [*counts]
        rows = [(each, part) for each, part in zip(self.sequences, parts, strict=True)]
        captured = [each.captured[part.start + self.later : part.stop + self.later] for each, part in rows]
        following = [each.tokens[part.start + 1 : part.stop + 1] for each, part in rows]
        return self.states(torch.cat(captured), torch.cat(following), chunks)

    def distributions(self, counts: Sequence[int], num: int = 3) -> list[Tensor]:
        """Returns, for each sequence, the distributions of its draft tokens, [num, vocabulary]; each is the text's."""
        found: list[Tensor] = []

        def draw(logits: Tensor) -> Tensor:
            found.append(logits.softmax(-1))
            following = [count + len(found) for count in counts]
            return torch.stack([each.tokens[at] for each, at in zip(self.sequences, following, strict=True)])

        self.network.propose(self.observe(counts), num, Ends(self.case), draw)
        assert len(found) == num
        return list(torch.stack(found, dim=1))


def naive_distributions(case: Case, sequences: Sequence[TargetSequence], counts: Sequence[int]) -> list[Tensor]:
    naive = NAIVE[case.algorithm]
    return [
        torch.stack(naive(case, case.parameters, each, count).distributions(3))
        for each, count in zip(sequences, counts, strict=True)
    ]


def largest_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float((mine - theirs).abs().max()) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("before", [[], [(3, 1, 2, 1, 9)], [(1, 1, 2, 1, 3), (2, 1, 5, 2, 9)]], ids=len)
@with_each_case
def test_drafting_equals_one_sequence_without_a_cache(case: Case, before: Sequence[Sequence[int]]) -> None:
    """Earlier draft tokens are overwritten in the cache."""
    counts = (5, 3, 8, 3, 11)
    drafted = Drafted(case, target_sequences(case, LENGTHS))
    for some in before:
        drafted.distributions(some)
    wanted = naive_distributions(case, drafted.sequences, counts)
    assert largest_difference(drafted.distributions(counts), wanted) < 1e-9


@with_each_case
def test_features_added_without_drafting_count(case: Case) -> None:
    drafted = Drafted(case, target_sequences(case, LENGTHS))
    drafted.network.extend_cache(drafted.observe((2, 1, 7, 1, 3)), Ends(case))
    counts = (5, 3, 8, 3, 11)
    wanted = naive_distributions(case, drafted.sequences, counts)
    assert largest_difference(drafted.distributions(counts), wanted) < 1e-9


@with_each_case
def test_fewer_draft_tokens_are_a_prefix(case: Case) -> None:
    drafted = Drafted(case, target_sequences(case, LENGTHS))
    wanted = [each[:2] for each in naive_distributions(case, drafted.sequences, OBSERVED)]
    assert largest_difference(drafted.distributions(OBSERVED, 2), wanted) < 1e-9


class CausalStates(TargetStates):
    def scratch_chunks(self, num_tokens: int, skipped: int = 0, is_causal: bool = True) -> list[ContinuationChunk]:
        return super().scratch_chunks(num_tokens, skipped)


class StatesSkippedTwice(TargetStates):
    def scratch_chunks(self, num_tokens: int, skipped: int = 0, is_causal: bool = True) -> list[ContinuationChunk]:
        return super().scratch_chunks(num_tokens, 2 * skipped + 1, is_causal)


WRONG: dict[str, Callable[[Drafted], Drafted]] = {
    "later features": lambda drafted: replace(drafted, later=1),
    "other tokens": lambda drafted: replace(
        drafted, sequences=[replace(each, tokens=each.tokens.roll(-1)) for each in drafted.sequences]
    ),
    "causal blocks": lambda drafted: replace(drafted, states=CausalStates),
    "gaps in the cache": lambda drafted: replace(drafted, states=StatesSkippedTwice),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("eagle3", "later features"),
        ("eagle3", "other tokens"),
        ("eagle3", "gaps in the cache"),
        ("dflash", "later features"),
        ("dflash", "other tokens"),
        ("dflash", "causal blocks"),
        ("dflash", "gaps in the cache"),
    ],
)
def test_wrong_features_or_attention_change_the_distributions(name: Algorithm, wrong: str) -> None:
    case = new_case(name)
    drafted = Drafted(case, target_sequences(case, LENGTHS))
    wanted = naive_distributions(case, drafted.sequences, OBSERVED)
    assert largest_difference(drafted.distributions(OBSERVED), wanted) < 1e-9
    assert largest_difference(WRONG[wrong](drafted).distributions(OBSERVED), wanted) > 1e-3


def test_default_lengths_follow_the_block_size() -> None:
    """The maximum is the block without its anchor; the default is a useful number."""
    shape: Any = new_case("dflash").shape
    for size, default in ((2, 1), (4, 3), (16, 7)):
        lengths = DFlash().draft_lengths(replace(shape, block_size=size))
        assert (lengths.default, lengths.most) == (default, size - 1)
        assert (lengths.num_passes(lengths.most), lengths.num_ahead(1)) == (1, size)
