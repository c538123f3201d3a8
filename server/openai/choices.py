"""Choices: what OpenAI's clients are told of the samples of a request, as they grow or all at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.openai import Asking
from ...schemas.openai_answers import CompletionTokensDetails, FinishReason, Usage
from ...schemas.sampling import GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from ...workers.protocol.verbs import SampledPart
from ..sampling.prompts import Prompt
from ..sampling.sampling_job import Stops
from ..text.sample_text import SampleText
from ..text.stop_strings import StopString
from ..text.tokenizer import Tokenizer
from .sample_batch import Drawn, Grown


@dataclass(frozen=True)
class Scored:
    """Tokens, one entry each, of a prompt or a sample. offsets: characters of the choice's text in front of them.

    logprobs: NaN = none. top: the likeliest first, None = not asked for.
    """

    token_ids: Sequence[int]
    offsets: Sequence[int]
    logprobs: np.ndarray
    top: TopkLogprobs | None


@dataclass(frozen=True)
class Fragment:
    """What is added to a choice. scored: None = not asked for. finish_reason: None = more comes."""

    index: int
    first: bool
    text: str
    token_ids: list[int]
    scored: Scored | None
    finish_reason: FinishReason | None

    @property
    def tells_something(self) -> bool:
        """Text may be held back."""
        return bool(self.first or self.text or self.finish_reason or self.scored is not None)


@dataclass(frozen=True)
class Echo:
    """A prompt at the front of its choices. scored: None = not asked for."""

    text: str = ""
    scored: Scored | None = None


class Choice:
    """One sample as it grows; whatever is told of it is in its fragments, in order. is_over: its end was told."""

    def __init__(self, asked: Asking, index: int, text: SampleText) -> None:
        self._asked = asked
        self._index = index
        self._text = text
        self._num_tokens = 0
        self._first = True
        self.is_over = False

    def echo(self, echo: Echo) -> Fragment:
        """In front of all other fragments."""
        return self._told(echo.text, [], None, None)

    def grow(self, part: SampledPart, num_echoed: int) -> Fragment:
        """num_echoed: characters of the choice's text that are the prompt's."""
        self.is_over = part.stop_reason is not None
        return self._fragment(part.tokens, part.logprobs, part.topk_logprobs, part.stop_reason, num_echoed)

    def finish(self, sequence: SampledSequence, num_echoed: int) -> Fragment:
        """sequence: all of the sample, whose end was not told yet."""
        self.is_over = True
        if self._asked.samples_nothing:
            return self._told("", [], None, "length")
        start, top = self._num_tokens, sequence.topk_logprobs
        rest = None if top is None else TopkLogprobs(top.token_ids[start:], top.logprobs[start:])
        tokens, logprobs = sequence.tokens[start:], sequence.logprobs[start:]
        return self._fragment(tokens, logprobs, rest, sequence.stop_reason, num_echoed)

    def _fragment(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        top: TopkLogprobs | None,
        finish_reason: FinishReason | None,
        num_echoed: int,
    ) -> Fragment:
        token_ids = tokens.tolist()
        self._num_tokens += len(token_ids)
        offsets = [num_echoed + offset for offset in self._text.add(token_ids)]
        shown = self._text.take(last=finish_reason is not None)
        # The worker may not have read the text to its end, as it was about to.
        if finish_reason is not None and self._text.stopped:
            finish_reason = "stop"
        scored = None if self._asked.num_top is None else Scored(token_ids, offsets, logprobs, top)
        return self._told(shown, token_ids, scored, finish_reason)

    def _told(
        self, text: str, token_ids: list[int], scored: Scored | None, finish_reason: FinishReason | None
    ) -> Fragment:
        first, self._first = self._first, False
        return Fragment(self._index, first, text, token_ids, scored, finish_reason)


class Choices:
    """The samples of all prompts of a request, which are the jobs of its draws."""

    def __init__(self, asked: Asking, tokenizer: Tokenizer, stops: Stops, prompts: Sequence[Prompt]) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._num_sampled = 0
        self._num_cached = 0
        self._guesses: list[GuessCounts] = []
        # Characters in front of each choice's own, once `echo` has told them.
        self._num_echoed = [0] * len(prompts)
        strings, ends = [StopString(stop) for stop in stops.strings], frozenset(stops.token_ids)
        self._choices = [
            [
                Choice(asked, job * asked.n + sample, SampleText(tokenizer, strings, ends, asked.min_tokens))
                for sample in range(asked.n)
            ]
            for job in range(len(prompts))
        ]

    def echo(self, job: int, response: SampleResponse | None = None) -> Echo:
        """Of one of the prompts, nothing where none is asked for. response: what scores it, if that is asked for."""
        if not self._asked.echoes:
            return Echo()
        prompt = self._prompts[job]
        text = SampleText(self._tokenizer)
        offsets = text.add(prompt.token_ids)
        shown = text.take(last=True)
        num_cut = prompt.num_marks(shown, self._tokenizer)
        self._num_echoed[job] = len(shown) - num_cut
        if response is None or response.prompt_logprobs is None:
            return Echo(shown[num_cut:])
        offsets = [max(0, offset - num_cut) for offset in offsets]
        scored = Scored(prompt.token_ids, offsets, response.prompt_logprobs, response.topk_prompt_logprobs)
        return Echo(shown[num_cut:], scored)

    def echoed(self, job: int, echo: Echo) -> Iterator[Fragment]:
        """The echo at the front of each choice of the job."""
        yield from (choice.echo(echo) for choice in self._choices[job])

    def grow(self, event: Grown) -> Iterator[Fragment]:
        for part in event.parts:
            yield self._choices[event.job][part.sample].grow(part, self._num_echoed[event.job])

    def finish(self, event: Drawn) -> Iterator[Fragment]:
        """What was not told yet; what is asked of usage, at once."""
        response = event.response
        self._num_cached += response.prompt_cache_hit_tokens
        if response.guesses is not None:
            self._guesses.append(response.guesses)
        if not self._asked.samples_nothing:
            self._num_sampled += response.num_tokens
        pairs = list(zip(self._choices[event.job], response.sequences, strict=True))
        num_echoed = self._num_echoed[event.job]
        return (choice.finish(sequence, num_echoed) for choice, sequence in pairs if not choice.is_over)

    def num_numbers(self, event: Drawn) -> int:
        """How many tokens, and alternatives to them, there are to tell of a job."""
        num_echoed = self._asked.n * len(self._prompts[event.job].token_ids) if self._asked.echoes else 0
        return (event.response.num_tokens + num_echoed) * (1 + (self._asked.num_top or 0))

    def usage(self) -> Usage:
        """Of what is finished."""
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
