"""A sampling request under way: what it asks, its samples so far, and when each of them ends."""

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....schemas.errors import OperationError
from ....schemas.sampling import GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from ...batch.validated import ModelLimits
from ...protocol.verbs import SampledPart, SampleJob
from ..logits.noise import SAMPLE_STREAM, noise_keys
from .prompt_scores import PromptScores, PromptScoring, wants_scores
from .stopping import StopStrings
from .text import Text

if TYPE_CHECKING:
    from .structured_output import Matcher

NOWHERE = -1

# The table compares every sample's tokens with so many; a job that has more looks its own up.
MOST_STOP_COLUMNS = 32

# Of one request.
MOST_SAMPLES = 1 << 16
MOST_CELLS = 1 << 24


class Guessed:
    """How a draft's guesses fared. num_passes: of the model over guesses. num_accepted: passes by how many were right
    at once."""

    def __init__(self) -> None:
        self.num_passes = self.num_guesses = 0
        self.num_accepted: list[int] = []

    def add(self, num_guesses: int, num_accepted: int) -> None:
        """Of a pass."""
        self.num_passes += 1
        self.num_guesses += num_guesses
        self.num_accepted += [0] * (num_guesses + 1 - len(self.num_accepted))
        self.num_accepted[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens that a pass gave."""
        return 1.0 + sum(number * passes for number, passes in enumerate(self.num_accepted)) / self.num_passes


class Row:
    """One sample of a job.

    tokens int32 and logprobs float32: sampled before it last left the table, in which `line` is its place, NOWHERE when
    it waits or has ended. top: of every token so far, where they are asked for. namespace: of its keys and values.
    guessed: by a draft. goes_alone: whether no draft is to guess it any more.
    """

    def __init__(self, job: "Job", sample: int, noise_key: int) -> None:
        self.job = job
        self.sample = sample
        self.noise_key = noise_key
        self.line = NOWHERE
        self.namespace = 0
        self.tokens = np.zeros(0, np.int32)
        self.logprobs = np.zeros(0, np.float32)
        self.top: list[TopkLogprobs] = []
        self.stop_reason: Literal["stop", "length"] | None = None
        self.guessed, self.goes_alone = Guessed(), False
        self._num_told = 0

    @cached_property
    def matcher(self) -> "Matcher | None":
        """What follows it, where it is constrained."""
        return None if self.job.matcher is None else self.job.matcher.copy()

    @cached_property
    def _stops(self) -> StopStrings | None:
        strings = self.job.request.stop_strings
        return StopStrings(self.job.text.tokenizer, strings, self.job.prompt.tolist()) if strings else None

    @property
    def order(self) -> tuple[int, int]:
        """Who came first, for admission and preemption."""
        return self.job.number, self.sample

    @property
    def length(self) -> int:
        """Of the prompt and `tokens`."""
        return len(self.job.prompt) + len(self.tokens)

    @property
    def longest_cached(self) -> int:
        """Tokens in the cache at the most; the last sample never gets there."""
        return len(self.job.prompt) + self.job.max_new_tokens - 1

    @property
    def needs_cache(self) -> bool:
        """Whether a token follows the next one."""
        return self.job.max_new_tokens - len(self.tokens) > 1

    @property
    def is_watched(self) -> bool:
        """Whether each of its tokens is looked at by itself."""
        job = self.job
        is_text = bool(job.request.stop_strings) or job.matcher is not None
        return is_text or job.request.topk_sample_logprobs > 0 or len(job.stop_token_ids) > MOST_STOP_COLUMNS

    @property
    def is_adjusted(self) -> bool:
        """Whether its tokens are chosen by other logits than the model's."""
        params = self.job.request.params
        penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        return bool(self.job.matcher is not None or params.logit_bias or params.min_tokens or penalties)

    def sequence(self) -> np.ndarray:
        """Prompt and tokens, int64."""
        return np.concatenate([self.job.prompt, self.tokens]) if len(self.tokens) else self.job.prompt

    def stops_after(self, token: int, count: int) -> bool:
        """Whether its next token, number `count`, ends it or completes a stop string or what its constraint allows."""
        if self.matcher is not None:
            self.matcher.advance(token)
        found = self._stops is not None and self._stops.found_after(token)
        if token in self.job.stop_token_ids or (self.matcher is not None and self.matcher.is_over):
            return True
        return found and count >= self.job.request.params.min_tokens

    def append_top(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Of the next token; a batch takes as many of the likeliest as any of its rows wants, so maybe too many."""
        k = self.job.request.topk_sample_logprobs
        if k:
            # Copies, lest each holds the arrays of its whole batch.
            self.top.append(TopkLogprobs(token_ids[:k].copy(), logprobs[:k].copy()))

    def untold(self) -> SampledPart | None:
        """What came since it was last asked."""
        start, self._num_told = self._num_told, len(self.tokens)
        if start == self._num_told:
            return None
        tokens, logprobs = self.tokens[start:], self.logprobs[start:]
        return SampledPart(self.sample, tokens, logprobs, _joined(self.top[start:]), self.stop_reason)

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None
        return SampledSequence(self.stop_reason, self.tokens, self.logprobs, _joined(self.top))


class Job:
    """number: the order of arrival. num_open: samples that have not ended.

    max_new_tokens ends every sample at the end of the context; a prompt that fills it gets the one token that follows.
    num_cache_hits: tokens of the prompt that were in the cache when it was first run, None before.
    """

    def __init__(self, request: SampleJob, number: int, limits: ModelLimits, text: Text) -> None:
        """Raises OperationError on a constraint not understood, and when there is no tokenizer for what needs one."""
        assert request.params.seed is not None, "the seed is drawn at submit"
        self.request = request
        self.number = number
        self.seed = request.params.seed
        self.prompt = request.prompt.astype(np.int64)
        room = max(1, limits.max_context_length - len(self.prompt))
        self.max_new_tokens = min(request.params.max_tokens or room, room)
        # What the model cannot draw stops nothing.
        self.stop_token_ids = frozenset(i for i in request.stop_token_ids if 0 <= i < limits.vocab_size)
        self.scores = PromptScoring(request) if wants_scores(request) else None
        self.num_cache_hits: int | None = None
        self.text = text
        self.matcher = text.matchers.new(constraint) if (constraint := request.params.constraint) is not None else None
        if request.stop_strings:
            _ = text.tokenizer
        keys = noise_keys(self.seed, SAMPLE_STREAM, np.arange(request.num_samples))
        self.rows = [Row(self, sample, key) for sample, key in enumerate(keys.tolist())]
        self.num_open = len(self.rows)

    @property
    def adapter_id(self) -> str | None:
        return self.request.adapter_id

    @property
    def adapter_key(self) -> str:
        """To sort by: "" for the base model."""
        return self.adapter_id or ""

    @property
    def weights(self) -> str:
        """What it samples, for messages."""
        return "the base model" if self.adapter_id is None else f"adapter {self.adapter_id}"

    @property
    def num_reusable(self) -> int:
        """Tokens of the prompt that need not be run if the cache has them; what is to be scored must."""
        return len(self.prompt) if self.scores is None or self.scores.is_done else self.scores.first_row

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Of logit_bias: token ids int64 and values float32."""
        bias = self.request.params.logit_bias or {}
        return np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    @cached_property
    def prompt_vocabulary(self) -> np.ndarray:
        """int64: the tokens of the prompt, each once."""
        return np.unique(self.prompt)

    def untold(self) -> tuple[SampledPart, ...]:
        return tuple(part for row in self.rows if (part := row.untold()) is not None)

    def result(self) -> SampleResponse:
        scores = self.scores.scores if self.scores is not None else PromptScores()
        return SampleResponse(
            sequences=tuple(row.result() for row in self.rows),
            prompt_logprobs=scores.logprobs,
            topk_prompt_logprobs=scores.top,
            target_prompt_logprobs=scores.targets,
            prompt_alt_tokens=scores.alternative_tokens,
            prompt_alt_logprobs=scores.alternative_logprobs,
            prompt_cache_hit_tokens=self.num_cache_hits or 0,
            guesses=_counts([row.guessed for row in self.rows]),
        )


def _counts(of_rows: Sequence[Guessed]) -> GuessCounts | None:
    passes = sum(each.num_passes for each in of_rows)
    if not passes:
        return None
    by_accepted = tuple(map(sum, zip_longest(*(each.num_accepted for each in of_rows), fillvalue=0)))
    accepted = sum(number * num for number, num in enumerate(by_accepted))
    return GuessCounts(passes, sum(each.num_guesses for each in of_rows), accepted, by_accepted)


def _joined(rows: list[TopkLogprobs]) -> TopkLogprobs | None:
    if not rows:
        return None
    return TopkLogprobs(np.stack([top.token_ids for top in rows]), np.stack([top.logprobs for top in rows]))


def check_request(request: SampleJob, limits: ModelLimits) -> None:
    """Raises OperationError naming what is wrong."""
    prompt = request.prompt
    if not len(prompt):
        raise OperationError("the prompt is empty: give at least one token, such as the model's BOS token")
    if len(prompt) > limits.max_context_length:
        raise OperationError(
            f"the prompt has {len(prompt)} tokens, more than the model's context of {limits.max_context_length}:"
            " shorten it"
        )
    _check_tokens("prompt", prompt, 0, limits)
    if biased := request.params.logit_bias:
        _check_tokens("logit_bias", np.array(list(biased)), 0, limits)
    if "" in request.stop_strings:
        raise OperationError("a stop string is empty, which would stop every sample at once: leave it out")
    _check_sizes(request, limits)
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise OperationError(
            f"prompt_logprobs_last_n {last_n} goes with prompt_logprobs and lies between 1 and len(prompt) - 1 ="
            f" {len(prompt) - 1}"
        )
    targets = request.target_prompt_tokens
    if targets is not None:
        if targets.ndim != 2 or len(targets) != len(prompt) - 1:
            raise OperationError(
                f"target_prompt_logprobs has shape {list(targets.shape)}, expected [len(prompt) - 1 ="
                f" {len(prompt) - 1}, K]"
            )
        _check_tokens("target_prompt_logprobs", targets, -1, limits)


def _check_sizes(request: SampleJob, limits: ModelLimits) -> None:
    """What would only fill memory."""
    if request.num_samples > MOST_SAMPLES:
        raise OperationError(f"num_samples {request.num_samples} exceeds {MOST_SAMPLES}: split the request")
    for name, k in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
    ):
        if k > limits.vocab_size:
            raise OperationError(f"{name} {k} exceeds the model's vocabulary of {limits.vocab_size}: lower it")
    num_prompt = len(request.prompt)
    room = max(1, limits.max_context_length - num_prompt)
    num_sampled = min(request.params.max_tokens or room, room)
    for name, k, num_tokens, kind in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, num_prompt, "prompt"),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k, num_prompt, "prompt"),
        ("topk_sample_logprobs", request.topk_sample_logprobs, num_sampled, "sampled"),
    ):
        if k * num_tokens > MOST_CELLS:
            raise OperationError(
                f"{name} {k} at {num_tokens} {kind} tokens makes more than {MOST_CELLS} cells: lower it or split the"
                " request"
            )


def _check_tokens(name: str, tokens: np.ndarray, lowest: int, limits: ModelLimits) -> None:
    wrong = tokens[(tokens < lowest) | (tokens >= limits.vocab_size)]
    if len(wrong):
        raise OperationError(
            f"{name} holds token id {int(wrong[0])}, outside the model's vocabulary of {limits.vocab_size}: use the"
            " tokenizer of this base model"
        )
