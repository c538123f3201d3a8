"""Patterns of layers' names in a `quantization_config`: names, wildcards, and regular expressions.

A file is not trusted: expressions are matched in time that grows with the square of a name's length, not by `re`, which
may take exponential time for more than one character. Lookarounds and references to groups are not supported.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_LONGEST, _MOST_NESTED, _MOST, _MOST_WILDCARDS = 1000, 20, 100_000, 1000
_WILDCARDS = "*?["
# Beginnings of groups, sets of characters, escaped characters, repetitions, and other characters.
_TOKEN = re.compile(r"\(\?:|\[\^?\]?(?:\\.|[^\\\]])*\]|\\.|[*+?]\??|\{[^}]*\}\??|.", re.DOTALL)
_UNENDED = ("[", "\\", "{")
_REPETITIONS: Mapping[str, tuple[int, int | None] | None] = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": None}

# Maps a name and the positions in it at which a part of an expression may begin to those at which it may end.
_Step = Callable[[str, frozenset[int]], frozenset[int]]


@dataclass(frozen=True)
class NamePatterns:
    """Patterns of names."""

    names: frozenset[str] = frozenset()
    """Names without wildcards."""
    wildcards: tuple[str, ...] = ()
    expressions: tuple[_Step, ...] = field(default=(), compare=False)

    @staticmethod
    def of(patterns: Sequence[str]) -> "NamePatterns":
        """Reads patterns, where "re:" begins a regular expression.

        Raises:
            ValueError: there are too many, or an expression is too long, wrong, or of an unknown form.
        """
        if len(patterns) > _MOST:
            raise ValueError(f"quantization_config has {len(patterns)} patterns of names: expected at most {_MOST}")
        expressions = tuple(_Parser(each).step() for each in patterns if each.startswith("re:"))
        plain = [each for each in patterns if not each.startswith("re:")]
        wildcards = tuple(each for each in plain if any(sign in each for sign in _WILDCARDS))
        # Each of them is compared with each name of a layer.
        if len(wildcards) + len(expressions) > _MOST_WILDCARDS or any(len(each) > _LONGEST for each in wildcards):
            raise ValueError(
                f"quantization_config has {len(wildcards)} wildcards and {len(expressions)} regular expressions of"
                f" names: expected at most {_MOST_WILDCARDS}, of {_LONGEST} characters"
            )
        return NamePatterns(frozenset(plain).difference(wildcards), wildcards, expressions)

    def match(self, name: str) -> bool:
        """True if a pattern names this layer or what it is part of, or an expression matches the name's beginning."""
        return (
            not self.names.isdisjoint(_outer_and_last_parts(name))
            or any(fnmatchcase(name, each) or fnmatchcase(name, f"{each}.*") for each in self.wildcards)
            or any(step(name, frozenset((0,))) for step in self.expressions)
        )


def _outer_and_last_parts(name: str) -> Iterator[str]:
    """Yields the name, the names of the modules around it, and the parts of the name after each dot."""
    yield name
    for place, character in enumerate(name):
        if character == ".":
            yield name[:place]
            yield name[place + 1 :]


class _Parser:
    """Reads a regular expression from its beginning to its end, once."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._depth = pattern, 0
        if len(pattern) > _LONGEST:
            raise self._error(f"it has {len(pattern)} characters, and at most {_LONGEST} are read")
        self._rest = _TOKEN.findall(pattern.removeprefix("re:"))[::-1]

    def step(self) -> _Step:
        found = self._choice()
        if self._rest:
            raise self._error("a group ends that did not begin")
        return found

    def _choice(self) -> _Step:
        steps = [self._sequence()]
        while self._rest[-1:] == ["|"]:
            self._next()
            steps.append(self._sequence())
        return steps[0] if len(steps) == 1 else lambda name, starts: _union(step(name, starts) for step in steps)

    def _sequence(self) -> _Step:
        steps: list[_Step] = []
        while self._rest and self._rest[-1] not in "|)":
            steps.append(self._repeated(self._one()))

        def run(name: str, starts: frozenset[int]) -> frozenset[int]:
            for step in steps:
                starts = step(name, starts)
            return starts

        return run

    def _one(self) -> _Step:
        token = self._next()
        if token in ("(", "(?:"):
            return self._group()
        if token == "^":
            return lambda name, starts: starts & {0}
        if token == "$":
            return lambda name, starts: starts & {len(name)}
        if token in _UNENDED:
            raise self._error("it ends too early")
        if token[0] in _REPETITIONS:
            raise self._error(f"{token[0]!r} has nothing to repeat")
        if token[0] == "\\" and token[1].isalnum() and token[1] not in "dDsSwW":
            raise self._error(f"{token} is not read")
        return self._character(token)

    def _character(self, token: str) -> _Step:
        try:
            one = re.compile(token, re.DOTALL)
        except re.error as error:
            raise self._error(f"{token} is wrong: {error}") from None
        return lambda name, starts: frozenset(start + 1 for start in starts if one.match(name, start))

    def _group(self) -> _Step:
        if self._rest and self._rest[-1][0] == "?":
            raise self._error("only plain groups are read")
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._error(f"more than {_MOST_NESTED} groups are in each other")
        found = self._choice()
        if self._next() != ")":
            raise self._error("a group does not end")
        self._depth -= 1
        return found

    def _repeated(self, step: _Step) -> _Step:
        """Returns the step with the repetitions that follow it. Lazy ones match the same names."""
        while self._rest and self._rest[-1][0] in _REPETITIONS:
            token = self._next()
            step = _repeat(step, *(_REPETITIONS[token[0]] or self._counts(token)))
        return step

    def _counts(self, token: str) -> tuple[int, int | None]:
        if token in _UNENDED:
            raise self._error("it ends too early")
        written = token.removesuffix("?")
        fewest, comma, most = written[1:-1].partition(",")
        if not all(each.isdecimal() for each in (fewest or "0", most or "0")):
            raise self._error(f"{written} is no number of repetitions")
        return int(fewest or 0), (int(most) if most else None) if comma else int(fewest)

    def _next(self) -> str:
        if not self._rest:
            raise self._error("it ends too early")
        return self._rest.pop()

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"quantization_config has the pattern {self._pattern[:80]!r}: {reason}")


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)


def _repeat(step: _Step, fewest: int, most: int | None) -> _Step:
    def run(name: str, starts: frozenset[int]) -> frozenset[int]:
        for _ in range(fewest):
            before, starts = starts, step(name, starts)
            if starts == before:
                break
        ends, count = starts, fewest
        while starts and (most is None or count < most):
            starts = step(name, starts) - ends
            ends, count = ends | starts, count + 1
        return ends

    return run
