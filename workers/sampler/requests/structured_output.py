"""Constraints: restricts sampled tokens to a JSON schema, a regular expression or a grammar."""

import json

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from ....schemas.errors import OperationError
from ....schemas.sampling import Constraint


class Matcher:
    """Follows one sample. vocab_size: of the model's logits, which may exceed the tokenizer's vocabulary."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def is_finished(self) -> bool:
        """True if no token can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Returns which tokens may follow, bool, [vocab]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        return np.pad(allowed, (0, self._vocab_size - len(allowed)))

    def advance(self, token: int) -> None:
        """Adds an allowed token. Raises OperationError if the library gives up, for instance on too large a grammar."""
        if not self._matcher.consume_token(token):
            raise OperationError(f"the constraint cannot be applied any further: {self._matcher.get_error()}")


class MatcherFactory:
    """Builds matchers for one model. Reads the tokenizer once, which takes a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """Raises OperationError if the tokenizer is not supported.

        Args:
            end_tokens: allowed after text that satisfies the constraint.
        """
        if not end_tokens:
            raise OperationError("this model does not support constraints: its config has no end token (eos_token_id)")
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=list(end_tokens))
        except (TypeError, ValueError) as error:
            raise OperationError(f"this model's tokenizer does not support constraints: {error}") from error
        self._vocab_size = vocab_size

    def new(self, constraint: Constraint) -> Matcher:
        """Raises OperationError if the schema, expression or grammar is invalid."""
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint))
        except (ValueError, RecursionError) as error:
            raise OperationError(f"the constraint is invalid: {error}") from error
        if matcher.is_error():
            raise OperationError(f"the constraint is invalid: {matcher.get_error()}")
        return Matcher(matcher, self._vocab_size)


def _grammar(constraint: Constraint) -> str:
    if constraint.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(json.dumps(constraint.json_schema))
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    assert constraint.grammar is not None
    return LLMatcher.grammar_from_lark(constraint.grammar)
