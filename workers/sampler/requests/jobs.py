"""A sampling request in flight and its sequences."""

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....schemas.sampling import GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from ...batch.validated import ModelLimits
from ...protocol.calls import SampledPart, SampleJob
from .prompt_scores import PromptScores
from .text import LazyTokenizer, StopStrings
from .token_choice import SAMPLE_STREAM, noise_keys

if TYPE_CHECKING:
    from .structured_output import Matcher

NOWHERE = -1

# The table compares tokens with at most this many stop tokens; jobs with more are checked one by one.
MAX_STOP_COLUMNS = 32


class AcceptanceStats:
    """Counts draft tokens.

    num_passes: forward passes of the target model over draft tokens.
    num_accepted: at index n, the passes that accepted n draft tokens.
    """

    def __init__(self) -> None:
        self.num_passes = self.num_draft_tokens = 0
        self.num_accepted: list[int] = []

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_passes += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += [0] * (num_draft_tokens + 1 - len(self.num_accepted))
        self.num_accepted[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per pass: accepted ones, and the one that the target model adds."""
        return 1.0 + sum(number * passes for number, passes in enumerate(self.num_accepted)) / self.num_passes


class SequenceState:
    """One sequence (sample) of a job.

    tokens, logprobs: int32 and float32, as of when it last left the table or was copied from it.
    line: its line in the table; NOWHERE while it waits and after it has ended.
    top: the likeliest tokens at each position, if requested.
    weight_version: of its keys and values, see PrefixCache.
    draft_stats: statistics of its draft tokens.
    without_draft: decodes without a draft from now on.
    """

    def __init__(self, job: "Job", sample: int, noise_key: int) -> None:
        self.job = job
        self.sample = sample
        self.noise_key = noise_key
        self.line = NOWHERE
        self.weight_version = 0
        self.tokens = np.zeros(0, np.int32)
        self.logprobs = np.zeros(0, np.float32)
        self.top: list[TopkLogprobs] = []
        self.stop_reason: Literal["stop", "length"] | None = None
        self.draft_stats, self.without_draft = AcceptanceStats(), False
        self._num_streamed = 0

    @cached_property
    def matcher(self) -> "Matcher | None":
        """Follows the constraint, if there is one and this rank decides."""
        return None if self.job.matcher is None else self.job.matcher.copy()

    @cached_property
    def _stops(self) -> StopStrings | None:
        strings = self.job.spec.stop_strings
        return StopStrings(self.job.text.tokenizer, strings, self.job.prompt.tolist()) if strings else None

    @property
    def order(self) -> tuple[int, int]:
        return self.job.number, self.sample

    @property
    def length(self) -> int:
        return len(self.job.prompt) + len(self.tokens)

    @property
    def longest_cached(self) -> int:
        """The most tokens that it can have in the cache: the last sampled one is never stored."""
        return len(self.job.prompt) + self.job.max_new_tokens - 1

    @property
    def needs_cache(self) -> bool:
        """True if another token follows the next one."""
        return self.job.max_new_tokens - len(self.tokens) > 1

    @property
    def needs_token_checks(self) -> bool:
        """True if each of its tokens needs a look by itself."""
        job = self.job
        is_text = bool(job.spec.stop_strings) or job.is_constrained
        return is_text or job.spec.topk_sample_logprobs > 0 or len(job.stop_token_ids) > MAX_STOP_COLUMNS

    @property
    def needs_processors(self) -> bool:
        """True if its tokens are sampled from processed logits."""
        params = self.job.spec.params
        penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        return bool(self.job.is_constrained or params.logit_bias or params.min_tokens or penalties)

    @property
    def may_use_draft(self) -> bool:
        """True if its parameters allow a draft, and draft tokens pay off."""
        return not (self.needs_processors or self.without_draft)

    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.job.prompt, self.tokens]) if len(self.tokens) else self.job.prompt

    def stops_after(self, token: int, count: int) -> bool:
        """True if the token, its `count`-th, is a stop token, completes a stop sequence or completes the constraint."""
        found = self._stops is not None and self._stops.found_after(token)
        if self.matcher is not None and (not self.matcher.advance(token) or self.matcher.is_finished):
            return True
        if token in self.job.stop_token_ids:
            return True
        return found and count >= self.job.spec.params.min_tokens

    def append_top(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Stores the likeliest tokens at the newest position. A batch computes the largest k of its sequences."""
        k = self.job.spec.topk_sample_logprobs
        if k:
            # Copies, because a view would keep the arrays of the whole batch alive.
            self.top.append(TopkLogprobs(token_ids[:k].copy(), logprobs[:k].copy()))

    def take_new_part(self) -> SampledPart | None:
        """Returns the tokens since the last call, or None."""
        start, self._num_streamed = self._num_streamed, len(self.tokens)
        if start == self._num_streamed:
            return None
        tokens, logprobs = self.tokens[start:], self.logprobs[start:]
        return SampledPart(self.sample, tokens, logprobs, _joined(self.top[start:]), self.stop_reason)

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None
        return SampledSequence(self.stop_reason, self.tokens, self.logprobs, _joined(self.top))


class Job:
    """A request and its sequences.

    spec: the request, as the server sent it.
    number: the order of arrival.
    num_open: sequences that have not ended.
    num_cache_hits: prompt tokens that were cached at the first prefill; None before it.
    is_constrained: its tokens must satisfy a constraint, which `matcher` follows on the rank that decides.
    """

    def __init__(
        self, spec: SampleJob, number: int, limits: ModelLimits, text: LazyTokenizer, decides: bool = True
    ) -> None:
        """Raises OperationError if the constraint is invalid, or if the model lacks a tokenizer that the job needs.

        Args:
            decides: whether this rank follows the constraint; others take its tokens, ends and failures.
        """
        self.spec = spec
        self.number = number
        self.seed = spec.seed
        self.prompt = spec.prompt.astype(np.int64)
        self.max_new_tokens = spec.max_tokens
        # The model never samples tokens outside its vocabulary.
        self.stop_token_ids = frozenset(i for i in spec.stop_token_ids if 0 <= i < limits.vocab_size)
        self.scores = PromptScores(spec)
        self.num_cache_hits: int | None = None
        self.text = text
        constraint = spec.params.constraint
        self.is_constrained = constraint is not None
        self.matcher = text.matchers.new(constraint) if constraint is not None and decides else None
        if spec.stop_strings:
            _ = text.tokenizer
        keys = noise_keys(self.seed, SAMPLE_STREAM, np.arange(spec.num_samples))
        self.sequences = [SequenceState(self, sample, key) for sample, key in enumerate(keys.tolist())]
        self.num_open = len(self.sequences)

    @property
    def adapter_id(self) -> str | None:
        return self.spec.adapter_id

    @property
    def adapter_key(self) -> str:
        """Sort key: "" for the base model."""
        return self.adapter_id or ""

    @property
    def num_reusable(self) -> int:
        """Prompt tokens that the prefix cache may replace: hidden states are needed where the prompt is scored."""
        return len(self.prompt) if self.scores.is_done else self.scores.first_position

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and values of logit_bias, int64 and float32."""
        bias = self.spec.params.logit_bias or {}
        return np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    @cached_property
    def stop_ids(self) -> np.ndarray:
        return np.fromiter(self.stop_token_ids, np.int64, len(self.stop_token_ids))

    @cached_property
    def prompt_vocabulary(self) -> np.ndarray:
        return np.unique(self.prompt)

    def take_new_parts(self) -> tuple[SampledPart, ...]:
        return tuple(part for sequence in self.sequences if (part := sequence.take_new_part()) is not None)

    def result(self) -> SampleResponse:
        return SampleResponse(
            sequences=tuple(sequence.result() for sequence in self.sequences),
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.top,
            target_prompt_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternative_tokens,
            prompt_alt_logprobs=self.scores.alternative_logprobs,
            prompt_cache_hit_tokens=self.num_cache_hits or 0,
            guesses=_counts([sequence.draft_stats for sequence in self.sequences]),
        )


def _counts(stats: Sequence[AcceptanceStats]) -> GuessCounts | None:
    passes = sum(each.num_passes for each in stats)
    if not passes:
        return None
    by_accepted = tuple(map(sum, zip_longest(*(each.num_accepted for each in stats), fillvalue=0)))
    accepted = sum(number * num for number, num in enumerate(by_accepted))
    return GuessCounts(passes, sum(each.num_draft_tokens for each in stats), accepted, by_accepted)


def _joined(tops: list[TopkLogprobs]) -> TopkLogprobs | None:
    if not tops:
        return None
    return TopkLogprobs(np.stack([top.token_ids for top in tops]), np.stack([top.logprobs for top in tops]))
