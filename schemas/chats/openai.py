"""Messages of the OpenAI-compatible endpoint: `/v1/completions` and `/v1/chat/completions`, `/v1/models`, and errors.

Fields of responses that are not required can be absent.
"""

import difflib
import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from ..bounds import MAX_TOKEN_IDS, ConstraintSchema, FirstErrorOnly, Id, Path, one_of
from ..codec import check_json_size
from ..errors import RequestError, expected, place_of
from ..sampling import MAX_STOP, LogitBias, NumDraftTokens, RepetitionPenalty, Shift, StopString, Temperature
from ..training import MAX_INTEGER, Integer, Natural, Positive, Seed

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_CHOICES_OF_A_PROMPT = 1024
COMPLETION_TOKENS = 16
_MAX_NAME_CHARACTERS = 80
"""Characters of a field's name that error messages repeat."""

_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "audio": (),
    "best_of": (1,),
    "continuous_usage_stats": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that the sampler does not support, with the values that are accepted because they have no effect."""

_WITHOUT_EFFECT = (
    "include_obfuscation",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that have no effect on sampling, with any value."""

Stop = Annotated[StopString, Field(min_length=1)]
Tokens = Annotated[list[Integer], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


class OpenAiError(RequestError):
    """A refused request. param: the invalid field. code: identifies the kind of error for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status)
        self.param = param
        self.code = code


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail

    @classmethod
    def of(cls, message: str, status: int, param: str | None = None, code: str | None = None) -> Self:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        codes = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
        return cls(error=ErrorDetail(message=message, type=kind, param=param, code=code or codes.get(status)))


class _Strict(BaseModel):
    """Refuses unknown fields."""

    remedies: ClassVar[Mapping[str, str]] = {}
    """Advice for fields that do not exist, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: Any) -> Any:
        """Raises an error for the first unknown field; pydantic would report all of them."""
        if not isinstance(fields, Mapping):
            return fields
        wanted = {
            name: value
            for name, value in fields.items()
            if value is not None and name not in _WITHOUT_EFFECT and value not in _NEUTRAL.get(name, ())
        }
        for name, value in wanted.items():
            if name not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_field", "{words}", {"name": name, "words": cls._refusal(name, value)}
                )
        return wanted

    @classmethod
    def _refusal(cls, name: str, value: JsonValue) -> str:
        near = () if name in _NEUTRAL else difflib.get_close_matches(name[:_MAX_NAME_CHARACTERS], cls.model_fields, 1)
        remedy = cls.remedies.get(name) or (f"did you mean {near[0]}?" if near else "leave it out")
        return f"is not supported here (it was {reprlib.repr(value)}): {remedy}"


class StreamOptions(_Strict):
    """Options of a stream. include_usage: adds a last chunk with the usage of the whole request."""

    include_usage: bool = False


class JsonSchemaFormat(BaseModel):
    """A JSON schema; name, description and strict are ignored: every completion conforms to the schema."""

    model_config = ConfigDict(frozen=True)

    json_schema: Annotated[ConstraintSchema, Field(alias="schema")]


class ResponseFormat(_Strict):
    """Sets the format of the completion: json_object allows any JSON object, json_schema the given schema only."""

    remedies = dict.fromkeys(("schema", "name", "strict"), 'write it into "json_schema": {"schema": ...}')

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class BaseCompletionRequest(_Strict):
    """Fields that both kinds of completion requests have. A field that is null counts as absent.

    top_k, min_p, min_tokens, repetition_penalty, stop_token_ids (in addition to the model's end tokens), ignore_eos
    (without the model's end tokens) and return_token_ids are those of other servers, such as vLLM. draft_path and
    num_draft_tokens: see SampleRequest.
    """

    model: Path
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_OF_A_PROMPT)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS), FirstErrorOnly()],
        one_of(f"a string or up to {MAX_STOP_STRINGS} strings, of 1 to {MAX_STOP} characters each"),
    ] = []
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_TOKEN_IDS)] = []
    ignore_eos: bool = False
    seed: Seed | None = None
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Natural = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Shift = 0.0
    frequency_penalty: Shift = 0.0
    logit_bias: LogitBias = {}
    response_format: ResponseFormat = ResponseFormat(type="text")
    return_token_ids: bool = False
    draft_path: Path | None = None
    num_draft_tokens: NumDraftTokens | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def echoes(self) -> bool:
        """True if choices begin with their prompt."""
        return False

    @property
    def wants_prompt_only(self) -> bool:
        """True if the request wants its prompt back and no tokens."""
        return False

    def max_sample_tokens(self, room: int) -> int | None:
        """Returns the most tokens of a sample, None = up to the end of the context.

        `room` is the number of tokens that the prompt leaves of the context.
        """
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of alternatives to report for each token; None = no log-probabilities."""
        raise NotImplementedError


class CompletionRequest(BaseCompletionRequest):
    """Requests completions.

    prompt: a text, several texts, the tokens of one, or the tokens of several. echo: returns the prompt before the
    completion, with log-probabilities if these are requested; max_tokens can be 0 then. max_tokens absent: 16, or the
    rest of the context if that is less.
    """

    prompt: Annotated[
        str | Tokens | Texts | Annotated[list[Tokens], FirstErrorOnly()],
        one_of("a text, token ids, or a list of texts or of lists of token ids"),
    ]
    max_tokens: Natural | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [[token for token in self.prompt if isinstance(token, int)]]
            case several:
                return [one for one in several if not isinstance(one, int)]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def wants_prompt_only(self) -> bool:
        return self.max_tokens == 0

    def max_sample_tokens(self, room: int) -> int | None:
        return min(COMPLETION_TOKENS, room) if self.max_tokens is None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    """Holds a part of a message's content. Types other than text are parsed only so that the error can name them."""

    model_config = ConfigDict(frozen=True)

    type: Id
    text: str = ""


class ChatMessage(BaseModel):
    """Holds a message of a chat. Other fields, such as tool_call_id or name, are passed to the model's chat template,
    as are tool calls."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Id
    content: str | Annotated[list[TextPart], FirstErrorOnly()] | None = None
    tool_calls: Annotated[list[dict[str, JsonValue]], FirstErrorOnly()] | None = None


class ChatCompletionRequest(BaseCompletionRequest):
    """Requests completions of a chat.

    tools: passed to the model's chat template, as are chat_template_kwargs; the model's calls are returned as text.
    add_generation_prompt: the template ends with the start of the assistant's message.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1), FirstErrorOnly()]
    tools: list[JsonValue] = []
    tool_choice: JsonValue = "auto"
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, JsonValue] = {}

    def max_sample_tokens(self, room: int) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


AnyCompletion = TypeVar("AnyCompletion", bound=BaseCompletionRequest)


def decoder(kind: type[AnyCompletion]) -> Callable[[bytes], AnyCompletion]:
    """Returns a decoder of bodies. It raises OpenAiError 400, naming the first invalid field, and RequestError 413."""
    return partial(_decode, kind)


def _decode(kind: type[AnyCompletion], body: bytes) -> AnyCompletion:
    check_json_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        # A field with several allowed types has an error for each; the others are more helpful than that of a type.
        of_field = [first, *(other for other in others if other["loc"][:1] == first["loc"][:1])]
        telling = next((one for one in of_field if not one["type"].endswith("_type")), first)
        raise _bad_request(telling) from None


def _bad_request(error: Mapping[str, Any]) -> OpenAiError:
    param = ".".join(str(part)[:_MAX_NAME_CHARACTERS] for part in place_of(error)) or None
    match error["type"]:
        case "json_invalid":
            return OpenAiError(f"the body is not valid JSON: {error['ctx']['error']}")
        case "missing":
            return OpenAiError(f"{param} is missing", param=param, code="missing_required_parameter")
        case "unknown_field":
            name, words = error["ctx"]["name"] or "''", error["ctx"]["words"]
            param = name if param is None else f"{param}.{name}"
            return OpenAiError(f"{param} {words}", param=param, code="unsupported_parameter")
        case _:
            message = f"{param or 'the body'} is {reprlib.repr(error['input'])}: {expected(error)}"
            return OpenAiError(message, param=param, code="invalid_value")


class Model(BaseModel):
    """A model that can be sampled."""

    id: str
    """The value to send as `model`."""
    object: Literal["model"] = "model"
    created: int
    """Seconds since 1970; of a base model, when the server started."""
    owned_by: str
    root: str
    """The name or path of the weights, as in vLLM."""
    parent: str | None = None
    """The base model of a checkpoint or sampler."""
    max_model_len: int | None = None
    """The context in tokens; None if the base model is not served."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


FinishReason = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """Counts the tokens of prompts. cached_tokens: those that the sampler had in its prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Counts draft tokens: those that were accepted, and those that were rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Counts tokens. A prompt counts once for all of its samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a choice.

    tokens: the text of each token. token_logprobs: null for the first token of a prompt. top_logprobs: for each token,
    text -> log-probability of the likeliest tokens and of itself. text_offset: characters of the choice's text before
    the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Holds a completion, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class TokenLogprob(TypedDict):
    """Holds the log-probability of a token. bytes: its UTF-8 encoding, which can be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class AnswerMessage(TypedDict):
    """A message of the assistant; in a chunk, the text to append, with the role in the first one."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChoice(TypedDict):
    """Holds a choice. message: in a complete response. delta: in a chunk of a stream."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[AnswerMessage]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]
