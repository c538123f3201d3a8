"""Samples are equal up to ties and to nothing else."""

import pytest

from .drawn import Drawn, all_drawn
from .drawn_files import drawn_test_files, exact_comparisons
from .unit import ROOT

EXACT = {
    "client/test_drafts.py",
    "schemas/test_codec.py",
    "server/http/test_decoding.py",
    "workers/batch/test_micro_batch.py",
    "workers/formats/test_released_ranks.py",
}
"""Test files that compare data that were sent, or what must be the same to the bit."""
ONE = Drawn([5, 9, 7], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "is_same"),
    [
        ([5, 9, 7], [-1.0, -2.0, -3.0], True),
        ([5, 300, 8, 8], [-1.0, -2.000001, -9.0, -9.0], True),  # as likely
        ([5, 10, 8], [-1.0, -6.0, -9.0], True),  # the neighbour in the vocabulary
        ([5, 300, 8], [-1.0, -2.001, -9.0], False),  # another token
        ([5, 300, 8], [-1.1, -2.0, -9.0], False),  # of another model
        ([5, 9], [-1.0, -2.0], False),
        ([5, 9, 7, 1], [-1.0, -2.0, -3.0, -1.0], False),
    ],
)
def test_samples_are_equal_up_to_ties(tokens: list[int], logprobs: list[float], is_same: bool) -> None:
    other = Drawn(tokens, logprobs)
    assert (other == ONE, other == ONE, other != ONE) == (is_same, is_same, not is_same)
    assert ([other] == [ONE]) == is_same and ({"a": [other]} == {"a": [ONE]}) == is_same


def test_a_test_may_have_one_tie_between_neighbours() -> None:
    """The same tie counts once. A fault that gives each sample the next token does not pass."""
    other = Drawn([5, 10, 7], [-1.0, -6.0, -3.0])
    assert other == ONE and other[:2] == ONE[:2] and [ONE, other] == [other, ONE]
    assert Drawn([6, 9, 7], [-8.0, -2.0, -3.0]) != ONE and other != ONE


def test_other_lists_are_compared_exactly() -> None:
    assert ONE == [5, 9, 7] and ONE[:2] == [5, 9] and ONE != [5, 10, 7] and ONE != "a"


def test_responses_in_json_are_read() -> None:
    response = {"sequences": [{"tokens": [5, 10, 7], "logprobs": [-1.0, -2.0, -3.0]}]}
    assert all_drawn(response) == [ONE]


def test_tests_compare_samples_up_to_ties() -> None:
    found = {path for path in (ROOT / "tests").rglob("*.py") if any(exact_comparisons(path.read_text()))}
    assert {str(path.relative_to(ROOT / "tests")) for path in found} <= EXACT, "compare them as tests/drawn.py does"
    assert ROOT / "tests/workers/models/test_every_family.py" in set(drawn_test_files())


@pytest.mark.parametrize(
    "code",
    [
        "a.sequences[0].tokens == b.sequences[0].tokens",
        "a.sequences[0].tokens.tolist() == b.sequences[0].tokens[:4].tolist()",
        "np.testing.assert_array_equal(a.sequences[0].tokens, b.sequences[i].tokens)",
        'a["sequences"][0]["tokens"] == list(b.sequences[0].tokens)',
        "[one.tokens for one in a] == [list(one.tokens) for one in b]",
    ],
)
def test_exact_comparisons_are_found(code: str) -> None:
    assert list(exact_comparisons(code)) == [1]
