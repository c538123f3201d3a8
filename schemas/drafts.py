"""Messages about draft models: their target, their vocabulary, and captured features. Those that create a draft are in
`models`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .bounds import FirstErrorOnly, Id, Path, first_error_only
from .sampling import ModelInput
from .training import DATUM_FIELDS, Positive, Request, SeqId, Wire
from .verbs import CHECKPOINT, SESSION_ID, Verb

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], FirstErrorOnly()]
Weights = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], FirstErrorOnly()]
_MAX_COUNTS = 1 << 24


class SetTargetRequest(Request):
    """Sets the target of a draft.

    path: a policy's checkpoint of the same base model; null or absent for the bare base model.
    """

    model_id: Id
    seq_id: SeqId = 0
    path: Path | None = None
    type: Literal["set_target"] = "set_target"


class SetTargetResponse(Wire):
    target_path: str | None = None
    type: Literal["set_target"] = "set_target"


class BuildVocabMapRequest(Request):
    """Builds a draft's vocabulary from the most frequent tokens. Give either tokens or counts.

    tokens: sequences of token ids. weights: one per token; tokens with weight 0 do not count. Absent: all count.
    counts: number of occurrences by token id.
    """

    model_id: Id
    seq_id: SeqId = 0
    tokens: Annotated[list[Tokens], FirstErrorOnly()] | None = None
    weights: Annotated[list[Weights], FirstErrorOnly()] | None = None
    counts: Annotated[dict[TokenId, Annotated[int, Field(ge=0, lt=1 << 40)]], first_error_only(_MAX_COUNTS)] | None = (
        None
    )
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
            raise ValueError("weights need tokens: leave them out, or give tokens")
        if [len(each) for each in weights] != [len(each) for each in self.tokens]:
            raise ValueError("weights and tokens have different lengths: give one weight for each token")


class BuildVocabMapResponse(Wire):
    """Describes the draft's new vocabulary.

    num_tokens: tokens that were counted. covered: fraction of these that are in the vocabulary. size: of the
    vocabulary. hash: of the vocabulary's ids, to compare two vocabularies.
    """

    num_tokens: int
    covered: float
    size: int
    hash: str
    type: Literal["build_vocab_map"] = "build_vocab_map"


class Captured(Request):
    """A sequence whose features are captured. Other fields of a datum are ignored."""

    is_about_results = True

    model_input: ModelInput | Annotated[Tokens, Field(min_length=1)]

    @property
    def unknown_names(self) -> Iterable[str]:
        return (name for name in super().unknown_names if name not in DATUM_FIELDS)

    @property
    def tokens(self) -> Sequence[int]:
        given = self.model_input
        return given.to_ints() if isinstance(given, ModelInput) else given


class CaptureRequest(Request):
    """Runs the draft's target over sequences and stores what the draft reads of it as features.

    ttl_seconds: how long the features are kept; absent: as long as the server allows.
    uses: how many forward_backward requests use each of them; the optim_step after the last one deletes it. Absent: no
    limit.
    """

    model_id: Id
    seq_id: SeqId = 0
    data: Annotated[list[Captured], Field(min_length=1), FirstErrorOnly()]
    ttl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    uses: Positive | None = None
    type: Literal["capture"] = "capture"


class CaptureResponse(Wire):
    """References the captured features.

    feature_refs: one for each datum, to be sent as feature_ref with data of the same tokens. num_bytes: stored bytes,
    with equal content counted once. expires_at: in seconds since 1970.
    """

    feature_refs: Sequence[str]
    num_bytes: int
    expires_at: float
    type: Literal["capture"] = "capture"


class ReleaseFeaturesRequest(Request):
    """Releases features that this model captured.

    feature_refs: absent for all of them. References that no longer exist are ignored.
    """

    model_id: Id
    feature_refs: Annotated[list[Id], Field(max_length=1 << 16), FirstErrorOnly()] | None = None


class ReleaseFeaturesResponse(Wire):
    """Counts the released references. Features that an unfinished optimizer step needs are deleted after it."""

    num_released: int
    type: Literal["release_features"] = "release_features"


DRAFT_ID = f"{SESSION_ID}:train:1"

SET_TARGET = Verb(
    "set_target",
    SetTargetRequest,
    SetTargetResponse,
    {"model_id": DRAFT_ID, "path": CHECKPOINT},
    """Makes a draft predict this checkpoint of a policy from now on; `path` null selects the bare base model.

    The draft keeps its weights and the gradients accumulated since its last optimizer step.
    """,
)
BUILD_VOCAB_MAP = Verb(
    "build_vocab_map",
    BuildVocabMapRequest,
    BuildVocabMapResponse,
    {"model_id": DRAFT_ID, "tokens": [[5, 6, 7, 6]]},
    """Sets a draft's vocabulary to the `draft_vocab_size` most frequent tokens.

    A draft with a reduced vocabulary needs this before its first forward_backward. Frequencies are those of the
    `tokens` whose `weights` are not 0, or `counts` by token id.
    """,
    is_large=True,
)
CAPTURE = Verb(
    "capture",
    CaptureRequest,
    CaptureResponse,
    {"model_id": DRAFT_ID, "data": [{"model_input": [5, 6, 7, 6]}]},
    """Stores the hidden states of a draft's target for these tokens on the server.

    Data of `forward_backward` and `forward` can refer to them by `feature_ref`; the target is not run again for those.
    If no room is free, or the draft is not created yet, the request waits and then answers 429. See docs/drafts.md.
    """,
    is_large=True,
)
VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (SET_TARGET, BUILD_VOCAB_MAP, CAPTURE)}
