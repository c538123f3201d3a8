"""What the OpenAI-compatible endpoint answers to completions and chats. A field that is not required may be absent."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """cached_tokens: of the prompts, what the sampler had computed before."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Of what a draft guessed: tokens that were sampled, and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """A prompt counts once, however many samples are drawn from it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class CompletionLogprobs(TypedDict):
    """By token: its text; its log-probability, null for the first of a prompt; text -> log-probability of the likeliest
    and of itself; and the characters of the choice's text in front of it."""

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
    """Also a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class TokenLogprob(TypedDict):
    """bytes: of the token's UTF-8, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class AnswerMessage(TypedDict):
    """A message of the assistant; in a chunk, what is added to it, the role once."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChoice(TypedDict):
    """message: of a whole answer. delta: of a chunk."""

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
