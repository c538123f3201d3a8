"""DFlash drafts blocks with a cache, many sequences at once: the same as in training and as one block at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from trainhouse.workers.drafts.algorithms.dflash import DFlash, DFlashNetwork
from trainhouse.workers.drafts.algorithms.logit_budget import LogitBudget
from trainhouse.workers.drafts.sequences.drafting import TargetStates
from trainhouse.workers.ops.kv_cache import CacheShelf, ContinuationChunk

from .test_dflash import (
    EMBEDDING,
    HEAD,
    LAYERS,
    OPTIONS,
    SHAPE,
    SIZE,
    Sample,
    features,
    labels,
    naive,
    naive_block,
    network,
    new_weights,
    samples,
)

LENGTHS, ANCHORS = (7, 4, 9, 9, 12), (5, 1, 8, 3, 11)


class Ends:
    """Stands in for drafting.Ends."""

    def embedded(self, tokens: Tensor) -> Tensor:
        return EMBEDDING[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return HEAD.logits(hidden)


@dataclass
class Drafted:
    """Gives each sequence a cache slot, and counts how many tokens the draft has seen of it. later: offset in tokens of
    the features it gets, 0 if they are right.
    """

    network: DFlashNetwork
    samples: Sequence[Sample]
    later: int = 0
    shelf: CacheShelf = field(default_factory=lambda: CacheShelf(LAYERS, 32))

    def __post_init__(self) -> None:
        self.shelf.resize(len(self.samples))
        self.num_seen = [0] * len(self.samples)

    def new_features(self, stops: Sequence[int]) -> TargetStates:
        """Returns the features of each sequence's tokens before `stops` that are new to the draft."""
        chunks: list[ContinuationChunk] = []
        captured: list[Tensor] = []
        following: list[Tensor] = []
        start = 0
        for number, (sample, stop) in enumerate(zip(self.samples, stops, strict=True)):
            first = self.num_seen[number]
            chunks.append(ContinuationChunk(start, start + stop - first, self.shelf, number, first))
            captured.append(sample.captured[first + self.later : stop + self.later])
            following.append(sample.tokens[first + 1 : stop + 1])
            start, self.num_seen[number] = start + stop - first, stop
        return TargetStates(torch.cat(captured), torch.cat(following), chunks)

    def distributions(self, anchors: Sequence[int], num: int = SIZE - 1) -> list[Tensor]:
        """Returns, for each sequence, the distributions of the guesses after its anchor, [num, vocabulary]."""
        found: list[Tensor] = []

        def draw(logits: Tensor) -> Tensor:
            found.append(logits.softmax(-1))
            return logits.argmax(-1)

        self.network.propose(self.new_features(anchors), num, Ends(), draw)
        assert len(found) == num
        return list(torch.stack(found, dim=1))


@torch.no_grad()
def trained_distributions(anchors: Sequence[int], some_samples: Sequence[Sample]) -> list[Tensor]:
    """Returns each sequence's distributions after its anchor from a training pass over that sequence."""
    wanted = []
    for sample, anchor in zip(some_samples, anchors, strict=True):
        alone = replace(sample, weights=torch.eye(len(sample.weights), dtype=torch.float64)[anchor])
        draft_pass = network(new_weights()).training_pass(features([alone]), labels([alone]), OPTIONS, LogitBudget(100))
        assert draft_pass.num_rows == 1
        draft_pass.scores(slice(0, 1))
        wanted.append(draft_pass._log_probs.exp())
    return wanted


def largest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float((mine - theirs).abs().max()) for mine, theirs in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("before", [[], [(3, 1, 2, 1, 9)], [(1, 1, 2, 1, 3), (2, 2, 5, 2, 10)]])
def test_drafting_uses_the_distributions_of_training(before: Sequence[Sequence[int]]) -> None:
    """Earlier blocks are overwritten in the cache."""
    some_samples, anchors = samples(LENGTHS), (5, 3, 8, 3, 11)
    drafted = Drafted(network(new_weights()), some_samples)
    for some in before:
        drafted.distributions(some)
    assert largest(drafted.distributions(anchors), trained_distributions(anchors, some_samples)) < 1e-9


def test_features_added_without_drafting_count() -> None:
    some_samples = samples(LENGTHS)
    drafted = Drafted(network(new_weights()), some_samples)
    drafted.network.extend_cache(drafted.new_features((2, 1, 7, 1, 3)), Ends())
    anchors = (5, 3, 8, 3, 11)
    assert largest(drafted.distributions(anchors), trained_distributions(anchors, some_samples)) < 1e-9


def test_batched_drafting_equals_one_block_at_a_time() -> None:
    some_samples, weights = samples(LENGTHS), new_weights()
    blocks = [naive_block(naive(weights), sample, anchor) for sample, anchor in zip(some_samples, ANCHORS, strict=True)]
    wanted = [torch.stack([torch.softmax(HEAD.weight @ each, 0) for each in block[1:]]) for block in blocks]
    assert largest(Drafted(network(weights), some_samples).distributions(ANCHORS), wanted) < 1e-9


def test_fewer_guesses_are_a_prefix_of_the_block() -> None:
    some_samples = samples(LENGTHS)
    wanted = [each[:2] for each in trained_distributions(ANCHORS, some_samples)]
    assert largest(Drafted(network(new_weights()), some_samples).distributions(ANCHORS, 2), wanted) < 1e-9


def shifted_features(drafted: Drafted) -> list[Tensor]:
    drafted.later = 1
    return drafted.distributions(ANCHORS)


def a_later_anchor(drafted: Drafted) -> list[Tensor]:
    """Takes the next token as the anchor, with the features before the right one."""
    drafted.samples = [replace(each, tokens=each.tokens.roll(-1)) for each in drafted.samples]
    return drafted.distributions(ANCHORS)


def one_feature_less(drafted: Drafted) -> list[Tensor]:
    return drafted.distributions([anchor - 1 for anchor in ANCHORS])


def causal_blocks(drafted: Drafted) -> list[Tensor]:
    class Causal(TargetStates):
        def scratch_chunks(self, num_tokens: int, skipped: int = 0, is_causal: bool = True) -> list[ContinuationChunk]:
            return super().scratch_chunks(num_tokens, skipped)

    new_features = drafted.new_features

    def causal(stops: Sequence[int]) -> TargetStates:
        each = new_features(stops)
        return Causal(each.captured, each.next_tokens, each.chunks)

    drafted.new_features = causal  # pyright: ignore[reportAttributeAccessIssue]
    return drafted.distributions(ANCHORS)


def no_own_block(drafted: Drafted) -> list[Tensor]:
    drafted.network.block_size = 2
    return [torch.cat([each] * (SIZE - 1)) for each in drafted.distributions(ANCHORS, 1)]


@pytest.mark.parametrize("wrong", [shifted_features, a_later_anchor, one_feature_less, causal_blocks, no_own_block])
def test_wrong_features_or_attention_change_the_distributions(wrong: Callable[[Drafted], list[Tensor]]) -> None:
    some_samples = samples([length + 1 for length in LENGTHS])
    right = trained_distributions(ANCHORS, some_samples)
    assert largest(Drafted(network(new_weights()), some_samples).distributions(ANCHORS), right) < 1e-9
    found = wrong(Drafted(network(new_weights()), some_samples))
    assert largest(found, right) > 1e-2


def test_draft_lengths_follow_the_block_size() -> None:
    """The maximum is the block without its anchor; the default is a useful number."""
    for size, usual in ((2, 1), (SIZE, SIZE - 1), (16, 7)):
        reach = DFlash().draft_lengths(replace(SHAPE, block_size=size))
        assert (reach.default, reach.most) == (usual, size - 1)
        assert (reach.num_passes(reach.most), reach.num_ahead(1)) == (1, size)
