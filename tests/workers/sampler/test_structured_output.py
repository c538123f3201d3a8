"""Constraints that pass their trial continue to work, however many samples they restrict."""

from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLParserLimits
from trainhouse.schemas.sampling import Constraint
from trainhouse.workers.sampler.requests import structured_output
from trainhouse.workers.sampler.requests.structured_output import Matcher, MatcherFactory, is_costly

from ...letters import VOCAB, letter_tokenizer
from ...server.sampling.test_constraint_checks import GOOD

WORDS = Constraint(regex=r"[^\s]{3,200}( [^\s]{3,200}){0,50}")
NUM_MASKS = 30_000


def new_factory() -> MatcherFactory:
    return MatcherFactory(letter_tokenizer().backend_tokenizer.to_str(), VOCAB, (2,))


def walk(matcher: Matcher, random: np.random.Generator, num_tokens: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the mask and a token that it allows, up to the end of the sample or `num_tokens`."""
    for _ in range(num_tokens):
        allowed = matcher.allowed()
        assert allowed is not None, matcher.failure
        if not allowed.any():
            return
        token = int(random.choice(np.flatnonzero(allowed)))
        yield allowed, token
        assert matcher.advance(token), matcher.failure
        if matcher.is_finished:
            return


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return new_factory()


@pytest.fixture
def small_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(step_lexer_fuel=200_000, step_max_items=20_000, max_lexer_states=4000, verbose_errors=False)
    monkeypatch.setattr(structured_output, "_LIMITS", limits)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", [*GOOD.values(), WORDS], ids=[*GOOD, "words"])
def test_a_constraint_that_passes_its_trial_lasts(factory: MatcherFactory, constraint: Constraint) -> None:
    matcher, random, num_masks = factory.new(constraint), np.random.default_rng(1), 0
    while num_masks < NUM_MASKS:
        num_masks += 1 + sum(1 for _ in walk(matcher.copy(), random, 400))


@pytest.mark.usefixtures("small_lexer")
def test_samples_go_on_with_the_same_masks_after_their_lexer_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    factory, compiled = new_factory(), structured_output.CompiledConstraint.compile
    num_compiled = 0

    def counting(self: structured_output.CompiledConstraint) -> None:
        nonlocal num_compiled
        num_compiled += 1
        compiled(self)

    monkeypatch.setattr(structured_output.CompiledConstraint, "compile", counting)
    first = factory.new(WORDS)
    walks = [walk(matcher, np.random.default_rng(number), 3000) for number, matcher in enumerate([first, first.copy()])]
    found = list(zip(*walks, strict=False))
    assert num_compiled > 1, "the lexer was full"

    monkeypatch.setattr(structured_output, "_LIMITS", LLParserLimits(max_lexer_states=10**6, verbose_errors=False))
    large = new_factory()
    expected = [walk(large.new(WORDS), np.random.default_rng(number), 3000) for number in range(2)]
    for number, pair in enumerate(zip(*expected, strict=False)):
        for (mask, token), (same, token_again) in zip(found[number], pair, strict=True):
            assert token == token_again and np.array_equal(mask, same), number
    masks = [mask for pair in found for mask, _ in pair]
    assert any(not np.array_equal(masks[0], mask) for mask in masks), "else any mask would be equal"


@pytest.mark.usefixtures("small_lexer")
def test_a_sample_that_needs_too_many_states_by_itself_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_FEWEST_MASKS", NUM_MASKS)
    factory = new_factory()
    matcher = factory.new(WORDS)
    with pytest.raises(AssertionError, match="too many states"):
        list(walk(matcher, np.random.default_rng(1), 10_000))
    assert matcher.failure is not None and not is_costly(matcher.failure), "others' samples may need fewer"
    assert factory.new(GOOD["date"]).allowed() is not None


def test_a_constraint_whose_masks_take_too_long_is_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(structured_output, "MASK_SECONDS", 0.0)
    matcher = new_factory().new(GOOD["date"])
    matcher.allowed()
    assert matcher.allowed() is None and matcher.failure is not None and is_costly(matcher.failure)
