"""Responses of the OpenAI-compatible endpoint to completions and chats. Fields that are not required can be absent."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

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
