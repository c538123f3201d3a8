"""Constraints: which tokens may come next of a sample that must match a schema, a regular expression or a grammar."""

import json

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from ....schemas.errors import OperationError
from ....schemas.sampling import Constraint


class Matcher:
    """Follows one sample. vocab_size: of the model's logits, which may have rows that the tokenizer does not know."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """bool [vocab]: what may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        return np.pad(allowed, (0, self._vocab_size - len(allowed)))

    def advance(self, token: int) -> None:
        """token: one that was allowed. Raises OperationError when the library gives up, on a grammar too large say."""
        if not self._matcher.consume_token(token):
            raise OperationError(f"the constraint cannot be followed any further: {self._matcher.get_error()}")


class Matchers:
    """Makes them for one model. The tokenizer takes a second to read: it is read once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """end_tokens: may follow what fulfils a constraint. Raises OperationError on another kind of tokenizer."""
        if not end_tokens:
            raise OperationError("this model takes no constraints: its config names no end token (eos_token_id)")
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=list(end_tokens))
        except (TypeError, ValueError) as error:
            raise OperationError(f"this model's tokenizer takes no constraints: {error}") from error
        self._vocab_size = vocab_size

    def new(self, constraint: Constraint) -> Matcher:
        """Raises OperationError on a schema, expression or grammar that is not understood."""
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint))
        except (ValueError, RecursionError) as error:
            raise OperationError(f"the constraint is not understood: {error}") from error
        if matcher.is_error():
            raise OperationError(f"the constraint is not understood: {matcher.get_error()}")
        return Matcher(matcher, self._vocab_size)


def _grammar(constraint: Constraint) -> str:
    if constraint.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(json.dumps(constraint.json_schema))
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    assert constraint.grammar is not None
    return LLMatcher.grammar_from_lark(constraint.grammar)
