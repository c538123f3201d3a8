"""Draft models: what they guess, and the tokens that they can say. How one is made is said in models."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .training import SeqId, Wire

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Sequence[TokenId]
Weights = Sequence[Annotated[float, Field(allow_inf_nan=False)]]


class SetTargetRequest(Wire):
    """path: of a policy's checkpoint of the same base model; null, or left out = the bare base model."""

    model_id: str
    seq_id: SeqId = 0
    path: str | None = None
    type: Literal["set_target"] = "set_target"


class SetTargetResponse(Wire):
    target_path: str | None = None
    type: Literal["set_target"] = "set_target"


class BuildVocabMapRequest(Wire):
    """What is counted, either of: tokens, sequences of ids, of which those count that have a weight other than 0, or
    all where there are no weights; counts, by token id."""

    model_id: str
    seq_id: SeqId = 0
    tokens: Sequence[Tokens] | None = None
    weights: Sequence[Weights] | None = None
    counts: dict[TokenId, Annotated[int, Field(ge=0, lt=1 << 40)]] | None = None
    type: Literal["build_vocab_map"] = "build_vocab_map"

    @model_validator(mode="after")
    def _counts_one_thing(self) -> Self:
        if (self.tokens is None) == (self.counts is None):
            raise ValueError("give either tokens or counts")
        if self.weights is not None:
            self._check_weights(self.weights)
        return self

    def _check_weights(self, weights: Sequence[Weights]) -> None:
        if self.tokens is None:
            raise ValueError("weights are of tokens: leave them out, or give tokens")
        if [len(each) for each in weights] != [len(each) for each in self.tokens]:
            raise ValueError("weights differ from tokens in their lengths: give one for each token")


class BuildVocabMapResponse(Wire):
    """num_tokens: that were counted. covered: the share of these that the draft can say. size: how many different ones
    it can say. hash: of their ids, by which two vocabularies are compared."""

    num_tokens: int
    covered: float
    size: int
    hash: str
    type: Literal["build_vocab_map"] = "build_vocab_map"
