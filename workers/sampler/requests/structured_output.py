"""Constraints: restricts sampled tokens to a JSON schema, a regular expression or a grammar.

Work per token is bounded: llguidance counts its steps up to limits, and a constraint whose masks take too long fails.
Only the server's check bounds compilation (server/sampling/constraint_process.py). Imports no torch.
"""

import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ....schemas.errors import OperationError
from ....schemas.sampling import Constraint

MASK_SECONDS = 0.005
"""The most processor time of a mask, on average over the samples of a constraint."""

_FREE_SECONDS = 0.1
"""Processor time for masks that take longer, the first ones above all: the lexer's states are built when needed."""

# With a vocabulary of 74,000 tokens a mask that reaches the limit on items takes 15 ms. One that reaches the limit on
# the lexer's work takes 5 to 50 ms, or 1 s for nested repetitions; a quarter of it is too little for [^\s]{3,200}.
# A state of the lexer takes about 1 kB.
_LIMITS = LLParserLimits(step_lexer_fuel=200_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False)

_TAKES, _TOO_COMPLEX = "the constraint takes", "the constraint cannot be applied any further"
_FULL = "too many states"
"""Part of the error of a lexer whose states have reached the limit."""

_MOST_COMPILED = 16
_FEWEST_MASKS = 100
"""A constraint is compiled again, which takes up to 0.1 s, only after so many masks."""


class CompiledConstraint:
    """A compiled constraint and what its masks have cost. All its samples share the states of its lexer, which add up
    until there are too many: then the constraint is compiled again."""

    def __init__(self, compiling: Callable[[], LLMatcher]) -> None:
        self._compiling = compiling
        self.compile()

    def compile(self) -> None:
        self.matcher = self._compiling()
        self.seconds, self.num_masks = 0.0, 0

    @property
    def is_new(self) -> bool:
        return self.num_masks < _FEWEST_MASKS

    @property
    def slowness(self) -> str | None:
        """Says how long the masks take if that is too long."""
        if self.seconds <= _FREE_SECONDS + MASK_SECONDS * self.num_masks:
            return None
        return (
            f"{_TAKES} {1000 * self.seconds / self.num_masks:.0f} ms for each token, more than"
            f" {1000 * MASK_SECONDS:g}: simplify it (fewer optional properties, alternatives and repetitions)"
        )


class Matcher:
    """Follows one sample."""

    def __init__(self, compiled: CompiledConstraint, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size
        self._original, self._matcher = compiled.matcher, compiled.matcher.deep_copy()
        self._tokens: list[int] = []
        self.failure: str | None = None
        """The reason why the sample cannot continue."""
        self.seconds = 0.0
        """Processor time of the last mask, and of starting again for it."""

    def copy(self) -> "Matcher":
        return Matcher(self._compiled, self._vocab_size)

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray | None:
        """Returns which tokens may follow, bool, [vocab]; None, and sets `failure`, if that takes too long."""
        self.failure = self.failure or self._compiled.slowness
        self.seconds = 0.0
        if self.failure is not None:
            return None
        bits = self._bitmask()
        if self._restarts():
            bits = self._bitmask()
        if self._has_failed():
            return None
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        return np.pad(allowed, (0, self._vocab_size - len(allowed)))

    def advance(self, token: int) -> bool:
        """Adds an allowed token. Returns False, and sets `failure`, if the sample cannot continue."""
        self._tokens.append(token)
        if self.failure is None and not self._matcher.consume_token(token):
            self._restarts()
            self._has_failed()
        return self.failure is None

    def _bitmask(self) -> np.ndarray:
        began = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        seconds = time.thread_time() - began
        self._compiled.seconds += seconds
        self._compiled.num_masks += 1
        self.seconds += seconds
        return bits

    def _restarts(self) -> bool:
        """Follows the sample from its beginning if the lexer was full; returns whether it did."""
        if _FULL not in self._matcher.get_error():
            return False
        began = time.thread_time()
        if self._original is self._compiled.matcher:
            if self._compiled.is_new:
                return False
            self._compiled.compile()
        self._original, self._matcher = self._compiled.matcher, self._compiled.matcher.deep_copy()
        self._matcher.consume_tokens(self._tokens)
        self.seconds += time.thread_time() - began
        return True

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            self.failure = f"{_TOO_COMPLEX}: {_short(self._matcher.get_error())}: simplify it"
        return self.failure is not None


class MatcherFactory:
    """Builds matchers for one model. Reads the tokenizer once, which takes a second."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """Raises OperationError if the tokenizer is not supported.

        Args:
            tokenizer: JSON of the tokenizers library.
            end_tokens: allowed after text that satisfies the constraint.
        """
        if not end_tokens:
            raise OperationError("this model does not support constraints: its config has no end token (eos_token_id)")
        try:
            self._tokenizer = LLTokenizer(tokenizer, eos_token=list(end_tokens))
        except (TypeError, ValueError) as error:
            raise OperationError(f"this model's tokenizer does not support constraints: {error}") from error
        self._vocab_size = vocab_size
        self._compiled: dict[str, CompiledConstraint] = {}

    def new(self, constraint: Constraint) -> Matcher:
        """Raises OperationError if the schema, expression or grammar is invalid."""
        key = constraint.digest
        compiled = self._compiled.pop(key, None) or CompiledConstraint(partial(self._compile, constraint))
        self._compiled[key] = compiled
        if len(self._compiled) > _MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return Matcher(compiled, self._vocab_size)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise OperationError(f"the constraint is invalid: {_short(str(error))}") from error
        if matcher.is_error():
            raise OperationError(f"the constraint is invalid: {_short(matcher.get_error())}")
        return matcher


def is_costly(failure: str) -> bool:
    """True if a sample failed because its constraint costs a rank too much, in any sample."""
    return failure.startswith((_TAKES, _TOO_COMPLEX)) and _FULL not in failure


def _grammar(constraint: Constraint) -> str:
    if constraint.json_schema is not None:
        # A weak model would write white space, which JSON allows between its tokens, up to max_tokens.
        schema = json.dumps(constraint.json_schema)
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    assert constraint.grammar is not None
    return LLMatcher.grammar_from_lark(constraint.grammar)


def _short(message: str) -> str:
    """Leaves out the state of the parser, and most of a message that repeats the constraint."""
    message = message.partition("\n<")[0]
    return message if len(message) <= 1000 else f"{message[:1000]}..."
