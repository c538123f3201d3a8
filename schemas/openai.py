"""The OpenAI-compatible endpoint: what `/v1/completions`, `/v1/chat/completions` and `/v1/models` take and answer."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from .errors import RequestError

MOST_STOP_STRINGS = 16
MOST_LOGPROBS = 20

FinishReason = Literal["stop", "length"]

_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "audio": (),
    "best_of": (1,),
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
"""Fields that the sampler cannot do, and the values with which they ask for nothing."""

_WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that change nothing in what is sampled, whatever they say."""


_BRANCHES = ("[key]", "str", "list[int]", "list[str]", "list[list[int]]", "list[TextPart]")
"""What stands among the names of fields in the place of an error, for keys and for the types that a field may have."""


class OpenAiError(RequestError):
    """param: the field that is wrong. code: what programs tell errors apart by."""

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


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage of all."""

    include_usage: bool = False


class JsonSchemaFormat(BaseModel):
    """name, description and strict change nothing: every answer conforms to the schema."""

    model_config = ConfigDict(frozen=True)

    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """json_schema: with type json_schema. Type json_object is any JSON object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class _Request(BaseModel):
    """What both kinds of completion ask for. A null is an absent field, a field that is not here is refused.

    top_k, min_p, min_tokens, repetition_penalty, stop_token_ids (beside the model's end tokens), ignore_eos (without
    them) and return_token_ids are known from other servers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=False)]] = {}
    response_format: ResponseFormat = ResponseFormat(type="text")
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if not _asks_for_nothing(name, value)}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most_tokens(self) -> int | None:
        """Of a sample; None = until the context ends."""
        raise NotImplementedError

    @property
    def num_top(self) -> int | None:
        """How many alternatives to report at each token; None = no log-probabilities."""
        raise NotImplementedError


class CompletionRequest(_Request):
    """prompt: one text, several, the tokens of one, or those of several. echo: the prompt is given back before the
    completion, scored when logprobs are asked for; max_tokens may be 0 then."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
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
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    """A piece of a message's content. Other types are known by name only and refused by it."""

    model_config = ConfigDict(frozen=True)

    type: str
    text: str = ""


class ChatMessage(BaseModel):
    """What else a message has, such as tool_call_id or name, is for the model's chat template, as calls are."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None


class ChatCompletionRequest(_Request):
    """tools are given to the model's chat template, which also reads chat_template_kwargs; calls of them come as text.

    add_generation_prompt: the template ends with the beginning of the answer.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[JsonValue] = []
    tool_choice: JsonValue = "auto"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, JsonValue] = {}

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


Asked = TypeVar("Asked", bound=_Request)


def decoder(kind: type[Asked]) -> Callable[[bytes], Asked]:
    """Of bodies. It raises OpenAiError 400, naming the first field that is wrong."""

    def decode(body: bytes) -> Asked:
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise _bad_request(error.errors(include_url=False)[0]) from None

    return decode


def _asks_for_nothing(name: str, value: JsonValue) -> bool:
    return value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ())


def _bad_request(error: Mapping[str, Any]) -> OpenAiError:
    param = ".".join(str(part) for part in error["loc"] if part not in _BRANCHES) or None
    match error["type"]:
        case "json_invalid":
            return OpenAiError(f"the body is not valid JSON: {error['ctx']['error']}")
        case "missing":
            return OpenAiError(f"{param} is missing", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            message = f"{param} is not supported here (it was {_shown(error['input'])}): leave it out"
            return OpenAiError(message, param=param, code="unsupported_parameter")
        case _:
            message = f"{param or 'the body'} is {_shown(error['input'])}: {error['msg']}"
            return OpenAiError(message, param=param, code="invalid_value")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Answers.


class _Answer(BaseModel):
    """Of the fields that are None those of `left_out` are not sent, the others as null."""

    left_out: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _send(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name not in self.left_out}


class PromptTokensDetails(BaseModel):
    """cached_tokens: of the prompts, what the sampler had computed before."""

    cached_tokens: int


class Usage(BaseModel):
    """A prompt counts once, however many samples are drawn from it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """By token: its text; its log-probability, null for the first of a prompt; text -> log-probability of the likeliest
    and of itself; and the characters of the choice's text in front of it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    left_out = ("token_ids", "prompt_token_ids")

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(_Answer):
    """Also a chunk of a stream."""

    left_out = ("usage",)

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(BaseModel):
    """bytes: of the token's UTF-8, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class AnswerMessage(_Answer):
    """A message of the assistant; in a chunk, what is added to it, the role once."""

    left_out = ("role",)

    role: Literal["assistant"] | None = None
    content: str


class ChatChoice(_Answer):
    """message: of a whole answer. delta: of a chunk."""

    left_out = ("message", "delta", "token_ids")

    index: int
    message: AnswerMessage | None = None
    delta: AnswerMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatCompletion(_Answer):
    left_out = ("usage", "prompt_token_ids")

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """id: what to send as `model`. created: seconds since the epoch."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
