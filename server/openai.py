"""OpenAI's requests in the words of our samplers, and samples in the words of OpenAI.

A field of SamplingParams that OpenAI's or vLLM's clients send takes a field in `schemas/openai.py`, out of its table of
what cannot be done, and a line in `sampling_params`.
"""

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, JsonValue

from ..schemas.openai import (
    MOST_STOP_STRINGS,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    FinishReason,
    OpenAiError,
    PromptTokensDetails,
    ResponseFormat,
    TokenLogprob,
    Usage,
)
from ..schemas.sampling import (
    Constraint,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TopkLogprobs,
)
from ..workers.verbs import SampledPart
from .draws import Drawn, Grown
from .sample_text import SampleText
from .samplers import MOST_SAMPLES, Stops
from .tokenizer import Chat, Tokenizer

AnyRequest = CompletionRequest | ChatCompletionRequest


# Requests


def sampling_params(asked: AnyRequest) -> SamplingParams:
    return SamplingParams(
        # One token is sampled, and dropped, where only the prompt is to be scored.
        max_tokens=None if asked.most_tokens is None else max(1, asked.most_tokens),
        seed=asked.seed,
        temperature=asked.temperature,
        top_k=asked.top_k or -1,  # vLLM's 0 is off, too
        top_p=asked.top_p,
        min_p=asked.min_p,
        min_tokens=asked.min_tokens,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias or None,
        constraint=_constraint(asked.response_format),
    )


def _constraint(answer: ResponseFormat) -> Constraint | None:
    match answer.type:
        case "text":
            return None
        case "json_object":
            return Constraint(json_schema={"type": "object"})
        case "json_schema":
            if answer.json_schema is None:
                raise OpenAiError("response_format.json_schema is missing", param="response_format.json_schema")
            return Constraint(json_schema=answer.json_schema.json_schema)


def sample_request(asked: AnyRequest, prompt: Sequence[int]) -> SampleRequest:
    scores_prompt = _echoes(asked) and asked.num_top is not None
    return SampleRequest(
        prompt=ModelInput.from_ints(prompt),
        sampling_params=sampling_params(asked),
        num_samples=asked.n,
        topk_sample_logprobs=asked.num_top or 0,
        prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=(asked.num_top or 0) if scores_prompt else 0,
    )


def stops_of(asked: AnyRequest, end_token_ids: Sequence[int]) -> Stops:
    """end_token_ids: the model's, which end a sample whatever else does."""
    ends = () if asked.ignore_eos else tuple(end_token_ids)
    return Stops((*ends, *asked.stop_token_ids), asked.stop_strings)


def check(asked: AnyRequest) -> None:
    """What no single field shows. Raises OpenAiError."""
    if "" in asked.stop_strings or len(asked.stop_strings) > MOST_STOP_STRINGS:
        raise OpenAiError(f"stop takes up to {MOST_STOP_STRINGS} strings that are not empty", param="stop")
    if isinstance(asked, CompletionRequest):
        _check_completion(asked)
    else:
        _check_chat(asked)


def _check_completion(asked: CompletionRequest) -> None:
    if not asked.prompts:
        raise OpenAiError("prompt is an empty list: send at least one", param="prompt")
    if (num_choices := len(asked.prompts) * asked.n) > MOST_SAMPLES:
        raise OpenAiError(
            f"{len(asked.prompts)} prompts with n {asked.n} ask for {num_choices} choices, and {MOST_SAMPLES} are the "
            "most: send several requests",
            param="prompt",
        )
    if not asked.max_tokens and not asked.echo:
        raise OpenAiError("max_tokens 0 leaves nothing to answer: raise it, or ask for echo", param="max_tokens")
    if asked.stream and asked.echo and asked.logprobs is not None:
        raise OpenAiError("echo with logprobs cannot be streamed: leave out stream", param="stream")


def _check_chat(asked: ChatCompletionRequest) -> None:
    if asked.top_logprobs and not asked.logprobs:
        raise OpenAiError(f"top_logprobs {asked.top_logprobs} needs logprobs: true", param="top_logprobs")
    if asked.tool_choice not in ("auto", "none"):
        raise OpenAiError(f"tool_choice {asked.tool_choice!r} is not supported: send auto or none", param="tool_choice")


async def prompts_of(asked: AnyRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """In tokens. Raises RequestError."""
    if isinstance(asked, CompletionRequest):
        return [await tokenizer.encode(one) if isinstance(one, str) else one for one in asked.prompts]
    chat = Chat(
        messages=[_template_message(number, message) for number, message in enumerate(asked.messages)],
        tools=asked.tools if asked.tools and asked.tool_choice != "none" else None,
        add_generation_prompt=asked.add_generation_prompt,
        variables=asked.chat_template_kwargs,
    )
    return [await tokenizer.encode_chat(chat)]


def _template_message(number: int, message: ChatMessage) -> dict[str, JsonValue]:
    """As chat templates read it: the parts of its content are one text, in lines."""
    fields = message.model_dump()
    if isinstance(message.content, list):
        if wrong := next((part for part in message.content if part.type != "text"), None):
            raise OpenAiError(
                f"messages.{number}.content has a part of type {wrong.type!r}, which is not supported: send text",
                param=f"messages.{number}.content",
            )
        fields["content"] = "\n".join(part.text for part in message.content)
    if message.tool_calls is not None:
        fields["tool_calls"] = [_template_call(number, call) for call in message.tool_calls]
    return fields


def _template_call(number: int, call: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Clients send the arguments as JSON in a string, templates read what is in it."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        # In their order, which templates may print.
        return {**call, "function": {**function, "arguments": json.loads(text or "{}")}}
    except ValueError as error:
        place = f"messages.{number}.tool_calls"
        raise OpenAiError(f"{place} has arguments that are not valid JSON: {error}", param=place) from None


def _echoes(asked: AnyRequest) -> bool:
    return isinstance(asked, CompletionRequest) and asked.echo


# Samples


@dataclass(frozen=True)
class ScoredToken:
    """offset: characters of the choice's text in front of it. logprob: None for the first of a prompt.

    top: id -> log-probability, the likeliest first.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: dict[int, float]


@dataclass(frozen=True)
class Fragment:
    """What is added to a choice. finish_reason: None = more comes."""

    index: int
    first: bool
    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    finish_reason: FinishReason | None


class Choice:
    """One sample as it grows. job: the number of its prompt. Whatever was told of it is in its fragments, in order.

    is_over: whether its end was told.
    """

    def __init__(self, asked: AnyRequest, tokenizer: Tokenizer, stops: Stops, job: int, sample: int) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._index = job * asked.n + sample
        self._text = SampleText(tokenizer, stops.strings, frozenset(stops.token_ids), asked.min_tokens)
        self._num_tokens = 0
        self._num_echoed = 0
        self._first = True
        self.is_over = False

    def grow(self, part: SampledPart) -> Fragment:
        self.is_over = part.stop_reason is not None
        return self._fragment(part.tokens, part.logprobs, part.topk_logprobs, part.stop_reason)

    def finish(self, sequence: SampledSequence) -> Fragment:
        """sequence: all of the sample, whose end was not told yet."""
        if self._asked.most_tokens == 0:
            return self._told("", [], [], "length")
        start, top = self._num_tokens, sequence.topk_logprobs
        rest = None if top is None else TopkLogprobs(top.token_ids[start:], top.logprobs[start:])
        return self._fragment(sequence.tokens[start:], sequence.logprobs[start:], rest, sequence.stop_reason)

    def echo(self, prompt: Sequence[int], response: SampleResponse | None) -> Fragment:
        """The prompt, at the front of the choice. response: that which scores it."""
        text = SampleText(self._tokenizer)
        text.add(prompt)
        shown = text.take(last=True)
        num_cut = int(self._tokenizer.marks_spaces and shown.startswith(" "))
        self._num_echoed = len(shown) - num_cut
        offsets = [max(0, offset - num_cut) for offset in text.offsets]
        scored = [] if response is None else _scored_prompt(prompt, offsets, response)
        return self._told(shown[num_cut:], [], scored, None)

    def _fragment(
        self, tokens: np.ndarray, logprobs: np.ndarray, top: TopkLogprobs | None, finish_reason: FinishReason | None
    ) -> Fragment:
        token_ids = tokens.tolist()
        self._text.add(token_ids)
        shown = self._text.take(last=finish_reason is not None)
        scored = []
        if self._asked.num_top is not None:
            offsets = [self._num_echoed + offset for offset in self._text.offsets[self._num_tokens :]]
            scored = list(_scored(token_ids, offsets, logprobs, top))
        self._num_tokens += len(token_ids)
        # The worker may not have read the text to its end, as it was about to.
        if finish_reason is not None and self._text.stopped:
            finish_reason = "stop"
        return self._told(shown, token_ids, scored, finish_reason)

    def _told(
        self, text: str, token_ids: list[int], scored: list[ScoredToken], finish_reason: FinishReason | None
    ) -> Fragment:
        first, self._first = self._first, False
        return Fragment(self._index, first, text, token_ids, scored, finish_reason)


def joined(fragments: Sequence[Fragment]) -> Fragment:
    """Consecutive ones of the same choice, as one."""
    return Fragment(
        index=fragments[0].index,
        first=fragments[0].first,
        text="".join(one.text for one in fragments),
        token_ids=[token for one in fragments for token in one.token_ids],
        scored=[token for one in fragments for token in one.scored],
        finish_reason=fragments[-1].finish_reason,
    )


def _scored(
    token_ids: Sequence[int], offsets: Sequence[int], logprobs: np.ndarray, top: TopkLogprobs | None
) -> Iterator[ScoredToken]:
    """A NaN is a log-probability that there is none of."""
    alternatives = [{}] * len(token_ids) if top is None else [_by_token(*row) for row in zip(*_lists(top), strict=True)]
    for token_id, offset, logprob, likeliest in zip(token_ids, offsets, logprobs.tolist(), alternatives, strict=True):
        yield ScoredToken(token_id, offset, None if math.isnan(logprob) else logprob, likeliest)


def _scored_prompt(prompt: Sequence[int], offsets: Sequence[int], response: SampleResponse) -> list[ScoredToken]:
    assert response.prompt_logprobs is not None
    return list(_scored(prompt, offsets, response.prompt_logprobs, response.topk_prompt_logprobs))


def _by_token(token_ids: list[int], logprobs: list[float]) -> dict[int, float]:
    return dict(zip(token_ids, logprobs, strict=True))


def _lists(top: TopkLogprobs) -> tuple[list[list[int]], list[list[float]]]:
    return top.token_ids.tolist(), top.logprobs.tolist()


class Choices:
    """The samples of all prompts of a request."""

    def __init__(self, asked: AnyRequest, tokenizer: Tokenizer, stops: Stops, prompts: Sequence[Sequence[int]]) -> None:
        self._asked = asked
        self._prompts = prompts
        self._choices = [
            [Choice(asked, tokenizer, stops, job, sample) for sample in range(asked.n)] for job in range(len(prompts))
        ]
        self._num_sampled = 0
        self._num_cached = 0

    def echoes(self) -> Iterator[Fragment]:
        """The prompts as text, where they are asked for."""
        if _echoes(self._asked):
            for prompt, choices in zip(self._prompts, self._choices, strict=True):
                yield from (choice.echo(prompt, None) for choice in choices)

    def grow(self, event: Grown) -> Iterator[Fragment]:
        for part in event.parts:
            yield self._choices[event.job][part.sample].grow(part)

    def finish(self, event: Drawn) -> Iterator[Fragment]:
        response = event.response
        self._num_cached += response.prompt_cache_hit_tokens
        for choice, sequence in zip(self._choices[event.job], response.sequences, strict=True):
            self._num_sampled += len(sequence.tokens) if self._asked.most_tokens != 0 else 0
            if not choice.is_over:
                yield choice.finish(sequence)

    def whole(self, event: Drawn) -> list[Fragment]:
        """All of what a job has drawn, one fragment a choice."""
        echoes = []
        if _echoes(self._asked):
            scored_by = None if self._asked.num_top is None else event.response
            prompt = self._prompts[event.job]
            echoes = [[choice.echo(prompt, scored_by)] for choice in self._choices[event.job]]
        rests = list(self.finish(event))
        return [joined([*echo, rest]) for echo, rest in zip(echoes or [[]] * len(rests), rests, strict=True)]

    def usage(self) -> Usage:
        num_prompt = sum(len(prompt) for prompt in self._prompts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_sampled,
            total_tokens=num_prompt + self._num_sampled,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached),
        )


# Answers


class Envelope:
    """What is the same in all that a request is answered."""

    def __init__(
        self, asked: CompletionRequest | ChatCompletionRequest, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._id = secrets.token_hex(12)
        self._created = int(time.time())

    def answer(self, fragments: Sequence[Fragment], usage: Usage) -> BaseModel:
        if isinstance(self._asked, CompletionRequest):
            return self._completion(fragments, usage)
        return self._chat("chat.completion", fragments, usage)

    def chunk(self, fragments: Sequence[Fragment], usage: Usage | None = None) -> BaseModel:
        if isinstance(self._asked, CompletionRequest):
            return self._completion(fragments, usage)
        return self._chat("chat.completion.chunk", fragments, usage)

    def _completion(self, fragments: Sequence[Fragment], usage: Usage | None) -> Completion:
        return Completion(
            id=f"cmpl-{self._id}",
            created=self._created,
            model=self._asked.model,
            choices=[self._completion_choice(fragment) for fragment in fragments],
            usage=usage,
        )

    def _completion_choice(self, fragment: Fragment) -> CompletionChoice:
        shows = self._asked.return_token_ids
        return CompletionChoice(
            index=fragment.index,
            text=fragment.text,
            logprobs=self._completion_logprobs(fragment.scored) if self._asked.num_top is not None else None,
            finish_reason=fragment.finish_reason,
            token_ids=fragment.token_ids if shows else None,
            prompt_token_ids=list(self._prompts[fragment.index // self._asked.n]) if shows and fragment.first else None,
        )

    def _completion_logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token_text(self._tokenizer, token.token_id) for token in scored],
            token_logprobs=[token.logprob for token in scored],
            top_logprobs=[self._likeliest(token) for token in scored],
            text_offset=[token.offset for token in scored],
        )

    def _likeliest(self, token: ScoredToken) -> dict[str, float] | None:
        """With itself; of two tokens with the same text, the likelier."""
        if token.logprob is None:
            return None
        logprobs: dict[str, float] = {}
        for token_id, logprob in (token.top | {token.token_id: token.logprob}).items():
            logprobs.setdefault(token_text(self._tokenizer, token_id), logprob)
        return logprobs

    def _chat(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk"],
        fragments: Sequence[Fragment],
        usage: Usage | None,
    ) -> ChatCompletion:
        shows = self._asked.return_token_ids and any(fragment.first for fragment in fragments)
        return ChatCompletion(
            id=f"chatcmpl-{self._id}",
            object=kind,
            created=self._created,
            model=self._asked.model,
            choices=[self._chat_choice(kind == "chat.completion", fragment) for fragment in fragments],
            usage=usage,
            prompt_token_ids=list(self._prompts[0]) if shows else None,
        )

    def _chat_choice(self, whole: bool, fragment: Fragment) -> ChatChoice:
        message = AnswerMessage(role="assistant" if fragment.first else None, content=fragment.text)
        return ChatChoice(
            index=fragment.index,
            message=message if whole else None,
            delta=None if whole else message,
            logprobs=self._chat_logprobs(fragment.scored) if self._asked.num_top is not None else None,
            finish_reason=fragment.finish_reason,
            token_ids=fragment.token_ids if self._asked.return_token_ids else None,
        )

    def _chat_logprobs(self, scored: Sequence[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._chat_logprob(token) for token in scored])

    def _chat_logprob(self, token: ScoredToken) -> ChatTokenLogprob:
        assert token.logprob is not None, "only prompts have tokens without, and chats echo none"
        itself = self._token_logprob(token.token_id, token.logprob)
        likeliest = [self._token_logprob(token_id, logprob) for token_id, logprob in token.top.items()]
        return ChatTokenLogprob(token=itself.token, logprob=itself.logprob, bytes=itself.bytes, top_logprobs=likeliest)

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        spelled = list(self._tokenizer.token_bytes(token_id))
        return TokenLogprob(token=token_text(self._tokenizer, token_id), logprob=logprob, bytes=spelled)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Of one that is not whole characters `bytes:\\xe2\\x82`; of one that the tokenizer does not know its number."""
    spelled = tokenizer.token_bytes(token_id)
    if not spelled:
        return f"token_id:{token_id}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
