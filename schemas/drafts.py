"""Draft models: what they guess, the tokens that they can say, and what is captured of their targets. How one is made
is said in models."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .bounds import FirstOnly, Id, Path, first_only_of
from .sampling import ModelInput
from .training import Positive, SeqId, Wire

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], FirstOnly()]
Weights = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], FirstOnly()]
_MOST_COUNTS = 1 << 24


class SetTargetRequest(Wire):
    """path: of a policy's checkpoint of the same base model; null, or left out = the bare base model."""

    model_id: Id
    seq_id: SeqId = 0
    path: Path | None = None
    type: Literal["set_target"] = "set_target"


class SetTargetResponse(Wire):
    target_path: str | None = None
    type: Literal["set_target"] = "set_target"


class BuildVocabMapRequest(Wire):
    """What is counted, either of: tokens, sequences of ids, of which those count that have a weight other than 0, or
    all where there are no weights; counts, by token id."""

    model_id: Id
    seq_id: SeqId = 0
    tokens: Annotated[list[Tokens], FirstOnly()] | None = None
    weights: Annotated[list[Weights], FirstOnly()] | None = None
    counts: Annotated[dict[TokenId, Annotated[int, Field(ge=0, lt=1 << 40)]], first_only_of(_MOST_COUNTS)] | None = None
    type: Literal["build_vocab_map"] = "build_vocab_map"

    @model_validator(mode="after")
    def _counts_one_thing(self) -> Self:
        if self.tokens is None and self.counts is None:
            raise ValueError("neither tokens nor counts are given: give either tokens or counts")
        if self.tokens is not None and self.counts is not None:
            raise ValueError("tokens and counts are both given: give either tokens or counts")
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


class Captured(Wire):
    """A sequence of which features are captured; what a datum has besides is not read."""

    model_input: ModelInput | Annotated[Tokens, Field(min_length=1)]

    @property
    def tokens(self) -> Sequence[int]:
        given = self.model_input
        return given.to_ints() if isinstance(given, ModelInput) else given


class CaptureRequest(Wire):
    """ttl_seconds: how long the features are kept; left out: as long as the server lets it. uses: how many times a
    forward_backward uses each; behind the last one's optim_step they are deleted. Left out: any number."""

    model_id: Id
    seq_id: SeqId = 0
    data: Annotated[list[Captured], Field(min_length=1), FirstOnly()]
    ttl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    uses: Positive | None = None
    type: Literal["capture"] = "capture"


class CaptureResponse(Wire):
    """feature_refs: for each datum what another one of the same tokens may carry. num_bytes: of what they refer to, the
    same content counted once. expires_at: in seconds since 1970."""

    feature_refs: Sequence[str]
    num_bytes: int
    expires_at: float
    type: Literal["capture"] = "capture"


class ReleaseFeaturesRequest(Wire):
    """feature_refs: that this model has captured; left out: all of them. Those that are gone are passed over."""

    model_id: Id
    feature_refs: Annotated[list[Id], Field(max_length=1 << 16), FirstOnly()] | None = None


class ReleaseFeaturesResponse(Wire):
    """num_released: references. What an unfinished step needs goes only behind it."""

    num_released: int
    type: Literal["release_features"] = "release_features"
