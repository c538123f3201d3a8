"""Names match patterns as in Python's re and fnmatch, in bounded time."""

import random
import re
from fnmatch import fnmatchcase

import pytest
from trainhouse.workers.shapes.name_patterns import NamePatterns

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "a-b[0]",
    "aaaab",
    "",
]
EXPRESSIONS = [
    ".*lm_head",
    ".*self_attn.*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"model\.layers\.\d+\.mlp\.gate$",
    r"^model\.layers\.(?:0|12)\..*",
    "(a+)+$",
    "(a|b)*",
    "a{2,3}b",
    "a{4}b",
    "a{,9}b",
    "a*?b$",
    r"[a-c\]-]+\[\d]$",
    "[^m].*",
    r"\w+\.\D*$",
    r"(?:[a-z_]+\.?)+$",
    "$",
    "a||b",
    "[]a]+b",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_match_as_in_re(expression: str) -> None:
    patterns = NamePatterns.of([f"re:{expression}"])
    assert [patterns.match(name) for name in NAMES] == [re.match(expression, name) is not None for name in NAMES]


def test_random_expressions_match_as_in_re() -> None:
    draw = random.Random(0)
    parts = ["a", "b", ".", "[ab]", "[^a]", "(a|b)", "(?:ab)", "a*", "b+", "(ab?)*", "a{1,2}", "(a*b)+", "(|a)", "$"]
    names = ["".join(draw.choices("ab", k=length)) for length in range(7) for _ in range(4)]
    found: set[bool] = set()
    for _ in range(300):
        expression = "".join(draw.choices(parts, k=4))
        for name in names:
            found.add(expected := re.match(expression, name) is not None)
            assert NamePatterns.of([f"re:{expression}"]).match(name) is expected, (expression, name)
    assert found == {True, False}


@pytest.mark.parametrize("pattern", ["lm_head", "model.layers.0.self_attn", "gate", "model.layers.1*", "*.mlp.gate"])
def test_names_stand_for_what_is_below_them(pattern: str) -> None:
    patterns = NamePatterns.of([pattern])
    expected = [
        fnmatchcase(name, pattern)
        or fnmatchcase(name, f"{pattern}.*")
        or ("*" not in pattern and name.endswith(f".{pattern}"))
        for name in NAMES
    ]
    assert [patterns.match(name) for name in NAMES] == expected and any(expected)


HOSTILE = [
    "(a+)+c",
    "(a|a)*c",
    "(a|aa)+c",
    "((a*)*)*c",
    "(.*)*x" * 9,
    ".*a" * 300,
    "(a?){1000000000}c",
    "(){999999999}c",
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("expression", HOSTILE)
def test_hostile_expressions_take_bounded_time(expression: str) -> None:
    """Python's own matcher would need years for most of them."""
    assert not NamePatterns.of([f"re:{expression}"]).match("a" * 100 + "b")


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("a" * 1000, "it has 1003 characters, and at most 1000 are read"),
        ("(" * 21 + ")" * 21, "more than 20 groups are in each other"),
        ("(?!a)b", "only plain groups are read"),
        (r"(a)\1", r"\\1 is not read"),
        ("(a", "it ends too early"),
        ("a)", "a group ends that did not begin"),
        ("[a", "it ends too early"),
        ("*a", "'\\*' has nothing to repeat"),
        ("a{b}", "{b} is no number of repetitions"),
    ],
)
def test_unknown_expressions_are_refused(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NamePatterns.of([f"re:{expression}"])


def test_too_many_patterns_are_refused() -> None:
    NamePatterns.of([str(number) for number in range(100_000)])
    with pytest.raises(ValueError, match="100001 patterns of names: expected at most 100000"):
        NamePatterns.of([str(number) for number in range(100_001)])


def test_many_or_long_wildcards_are_refused() -> None:
    NamePatterns.of(["a*"] * 1000)
    for patterns in (["a*"] * 1001, ["re:a"] * 1001, ["*" * 1001]):
        with pytest.raises(ValueError, match=r"wildcards and .* regular expressions of names: expected at most 1000"):
            NamePatterns.of(patterns)
