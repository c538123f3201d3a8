"""Turns the samples of an OpenAI request into the deltas of its choices, streamed or all at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.chats.openai import BaseCompletionRequest, CompletionTokensDetails, FinishReason, Usage
from ...schemas.sampling import GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from ...workers.protocol.calls import SampledPart
from ..sampling.sampling_job import Stops
from ..text.sample_text import SampleText, StopString
from ..text.tokenizer import Tokenizer
from .prompts import Prompt
from .sample_batch import JobProgress, JobResult


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the tokens of a prompt or a sample, one entry per token.

    offsets: characters of the choice's text before each token. logprobs: NaN where a token has none.
    top: the alternatives, likeliest first; None if not requested.
    """

    token_ids: Sequence[int]
    offsets: Sequence[int]
    logprobs: np.ndarray
    top: TopkLogprobs | None


@dataclass(frozen=True)
class ChoiceDelta:
    """Holds what is added to a choice. scored: None if not requested. finish_reason: None if the choice continues."""

    index: int
    first: bool
    text: str
    token_ids: list[int]
    scored: TokenScores | None
    finish_reason: FinishReason | None

    @property
    def has_content(self) -> bool:
        """True if the delta is worth a chunk; it is empty while its text could be the start of a stop string."""
        return bool(self.first or self.text or self.finish_reason or self.scored is not None)


@dataclass(frozen=True)
class Echo:
    """The prompt as echoed before its choices. scored: None if not requested."""

    text: str = ""
    scored: TokenScores | None = None


class ChoiceStream:
    """One sample as it grows. Its deltas, in order, add up to the choice. is_over: the last one was returned."""

    def __init__(self, request: BaseCompletionRequest, index: int, text: SampleText) -> None:
        self._request = request
        self._index = index
        self._text = text
        self._num_tokens = 0
        self._first = True
        self.is_over = False

    def echo(self, echo: Echo) -> ChoiceDelta:
        """Returns the delta with the prompt, which must precede all others."""
        return self._delta(echo.text, [], None, None)

    def grow(self, part: SampledPart, num_echoed: int) -> ChoiceDelta:
        """Returns the delta for the part.

        Args:
            num_echoed: characters of the choice's text that belong to the echoed prompt.
        """
        self.is_over = part.stop_reason is not None
        return self._delta_of_tokens(part.tokens, part.logprobs, part.topk_logprobs, part.stop_reason, num_echoed)

    def finish(self, sequence: SampledSequence, num_echoed: int) -> ChoiceDelta:
        """Returns the last delta, with all tokens of the finished sample that earlier deltas did not have.

        Args:
            sequence: the whole sample.
            num_echoed: characters of the choice's text that belong to the echoed prompt.
        """
        self.is_over = True
        if self._request.wants_prompt_only:
            return self._delta("", [], None, "length")
        start, top = self._num_tokens, sequence.topk_logprobs
        rest = None if top is None else TopkLogprobs(top.token_ids[start:], top.logprobs[start:])
        tokens, logprobs = sequence.tokens[start:], sequence.logprobs[start:]
        return self._delta_of_tokens(tokens, logprobs, rest, sequence.stop_reason, num_echoed)

    def _delta_of_tokens(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        top: TopkLogprobs | None,
        finish_reason: FinishReason | None,
        num_echoed: int,
    ) -> ChoiceDelta:
        token_ids = tokens.tolist()
        self._num_tokens += len(token_ids)
        offsets = [num_echoed + offset for offset in self._text.add(token_ids)]
        shown = self._text.take(last=finish_reason is not None)
        # The worker may reach the token limit before it has searched the last tokens for stop strings.
        if finish_reason is not None and self._text.found_stop:
            finish_reason = "stop"
        scored = None if self._request.num_top_logprobs is None else TokenScores(token_ids, offsets, logprobs, top)
        return self._delta(shown, token_ids, scored, finish_reason)

    def _delta(
        self, text: str, token_ids: list[int], scored: TokenScores | None, finish_reason: FinishReason | None
    ) -> ChoiceDelta:
        first, self._first = self._first, False
        return ChoiceDelta(self._index, first, text, token_ids, scored, finish_reason)


class RequestChoices:
    """The choices of a request: `n` samples per prompt, one sampling job per prompt. Counts the usage."""

    def __init__(
        self, request: BaseCompletionRequest, tokenizer: Tokenizer, stops: Stops, prompts: Sequence[Prompt]
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._num_sampled = 0
        self._num_cached = 0
        self._guesses: list[GuessCounts] = []
        # By job: characters of the echoed prompt, counted in `echo`.
        self._num_echoed = [0] * len(prompts)
        strings, ends = [StopString(stop) for stop in stops.strings], frozenset(stops.token_ids)
        self._choices = [
            [
                ChoiceStream(
                    request, job * request.n + sample, SampleText(tokenizer, strings, ends, request.min_tokens)
                )
                for sample in range(request.n)
            ]
            for job in range(len(prompts))
        ]

    def echo(self, job: int, response: SampleResponse | None = None) -> Echo:
        """Returns the echo of a job's prompt, which is empty if the request has no `echo`.

        Args:
            response: contains the prompt's log-probabilities if the request wants them.
        """
        if not self._request.echoes:
            return Echo()
        prompt = self._prompts[job]
        num_added = 0 if prompt.text is None else len(self._tokenizer.chats.first_tokens)
        text = SampleText(self._tokenizer, shows_special=True)
        offsets = text.add(prompt.token_ids[num_added:])
        shown = text.take(last=True)
        num_cut = prompt.num_added_spaces(shown, self._tokenizer)
        echoed = shown[num_cut:] if prompt.text is None else prompt.text
        self._num_echoed[job] = length = len(echoed)
        if response is None or response.prompt_logprobs is None:
            return Echo(echoed)
        offsets = [*[0] * num_added, *(min(max(0, offset - num_cut), length) for offset in offsets)]
        scored = TokenScores(prompt.token_ids, offsets, response.prompt_logprobs, response.topk_prompt_logprobs)
        return Echo(echoed, scored)

    def echo_choices(self, job: int, echo: Echo) -> Iterator[ChoiceDelta]:
        """Yields the echo once for each choice of the job."""
        yield from (choice.echo(echo) for choice in self._choices[job])

    def grow(self, event: JobProgress) -> Iterator[ChoiceDelta]:
        for part in event.parts:
            yield self._choices[event.job][part.sample].grow(part, self._num_echoed[event.job])

    def finish(self, event: JobResult) -> Iterator[ChoiceDelta]:
        """Returns the last deltas of the job's unfinished choices; the usage is counted at the call, not lazily."""
        response = event.response
        self._num_cached += response.prompt_cache_hit_tokens
        if response.guesses is not None:
            self._guesses.append(response.guesses)
        if not self._request.wants_prompt_only:
            self._num_sampled += response.num_tokens
        pairs = list(zip(self._choices[event.job], response.sequences, strict=True))
        num_echoed = self._num_echoed[event.job]
        return (choice.finish(sequence, num_echoed) for choice, sequence in pairs if not choice.is_over)

    def count_numbers(self, event: JobResult) -> int:
        """Returns how many tokens and alternatives the job adds to the response; a measure of the work to encode it."""
        num_echoed = self._request.n * len(self._prompts[event.job].token_ids) if self._request.echoes else 0
        return (event.response.num_tokens + num_echoed) * (1 + (self._request.num_top_logprobs or 0))

    def usage(self) -> Usage:
        """Returns the usage of the jobs finished so far."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        usage: Usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_sampled,
            "total_tokens": num_prompt + self._num_sampled,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
        if self._guesses:
            accepted = sum(each.accepted for each in self._guesses)
            rejected = sum(each.drafted for each in self._guesses) - accepted
            details: CompletionTokensDetails = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
            usage["completion_tokens_details"] = details
        return usage
