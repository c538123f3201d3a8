"""Scores of a prompt: log-probabilities of its own, the likeliest, given and sampled tokens at each position."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....schemas.sampling import TopkLogprobs
from ...protocol.calls import SampleJob
from .token_choice import ALTERNATIVE_STREAM, invert_cdf, is_greedy, noise_keys, uniforms

_EMPTY_LOGPROB = -99999.0


class PromptScores:
    """Scores a prompt from its hidden states, which arrive in order and perhaps repeatedly.

    The arrays are fields of SampleResponse, None if they are not requested.
    """

    def __init__(self, spec: SampleJob) -> None:
        length, targets, k = len(spec.prompt), spec.target_prompt_tokens, spec.prompt_alt_tokens_k
        self.logprobs = np.full(length, np.nan, np.float32) if spec.prompt_logprobs else None
        top_k = spec.topk_prompt_logprobs
        ids, values = np.zeros((length, top_k), np.int32), np.full((length, top_k), _EMPTY_LOGPROB, np.float32)
        self.top = TopkLogprobs(ids, values) if top_k else None
        self.targets = None if targets is None else np.zeros(targets.shape, np.float32)
        self.alternative_tokens = np.zeros((length - 1, k), np.int32) if k else None
        self.alternative_logprobs = np.zeros((length - 1, k), np.float32) if k else None
        self._spec = spec
        self._last_position = length - 1
        self._first_scored = self._last_position - (spec.prompt_logprobs_last_n or self._last_position)
        scores_every_position, scores_own = targets is not None or k > 0, spec.prompt_logprobs or self.top is not None
        self.first_position = 0 if scores_every_position else self._first_scored
        """The first position whose hidden state is needed; it predicts the next token."""
        self._next_position = self.first_position if scores_every_position or scores_own else self._last_position

    @property
    def is_done(self) -> bool:
        return self._next_position >= self._last_position

    def score(self, start: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], chunk: int) -> None:
        """Scores the positions from `start` on, except those already scored and those behind the prompt.

        Args:
            hidden: [n, hidden_size].
            logits_of: maps at most `chunk` hidden states to logits.
        """
        stop = min(start + len(hidden), self._last_position)
        for first in range(self._next_position, stop, chunk):
            # The hidden state at position i predicts the token at position i + 1.
            positions = np.arange(first, min(first + chunk, stop))
            log_softmax = torch.log_softmax(logits_of(hidden[positions[0] - start : positions[-1] + 1 - start]), dim=-1)
            skipped = max(0, self._first_scored - first)
            self._score_tokens(positions[skipped:], log_softmax[skipped:])
            self._score_targets(positions, log_softmax)
            self._draw_alternatives(positions, log_softmax)
        self._next_position = max(self._next_position, stop)

    def _score_tokens(self, positions: np.ndarray, log_softmax: Tensor) -> None:
        if self.logprobs is not None:
            tokens = self._spec.prompt[positions + 1, None]
            self.logprobs[positions + 1] = _logprobs_of(tokens, log_softmax)[:, 0]
        if (scored := self.top) is not None:
            top = top_logprobs(log_softmax, self._spec.topk_prompt_logprobs)
            scored.token_ids[positions + 1], scored.logprobs[positions + 1] = top.token_ids, top.logprobs

    def _score_targets(self, positions: np.ndarray, log_softmax: Tensor) -> None:
        if self.targets is None or self._spec.target_prompt_tokens is None:
            return
        targets = self._spec.target_prompt_tokens[positions]
        logprobs = _logprobs_of(np.maximum(targets, 0), log_softmax)
        self.targets[positions] = np.where(targets >= 0, logprobs, 0.0)

    def _draw_alternatives(self, positions: np.ndarray, log_softmax: Tensor) -> None:
        """Samples alternatives at the request's temperature, without top_k and top_p. Greedy ones are all equal."""
        num, params = self._spec.prompt_alt_tokens_k, self._spec.params
        if self.alternative_tokens is None or self.alternative_logprobs is None:
            return
        if is_greedy(params):
            drawn = log_softmax.argmax(-1, keepdim=True).expand(-1, num)
        else:
            assert params.seed is not None
            keys = noise_keys(params.seed, ALTERNATIVE_STREAM, np.arange(num))
            noise = torch.from_numpy(uniforms(keys, positions[:, None] + 1)).to(log_softmax)
            drawn = invert_cdf(torch.softmax(log_softmax / params.temperature, dim=-1), noise)
        tokens = drawn.cpu().numpy()
        self.alternative_tokens[positions] = tokens
        self.alternative_logprobs[positions] = _logprobs_of(tokens, log_softmax)


def top_logprobs(log_softmax: Tensor, k: int) -> TopkLogprobs:
    """Returns the k likeliest tokens at each position.

    Args:
        log_softmax: [n, vocab].
        k: at most the vocabulary size.
    """
    best = log_softmax.topk(k)
    return TopkLogprobs(best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy())


def _logprobs_of(tokens: np.ndarray, log_softmax: Tensor) -> np.ndarray:
    """Returns float32, [n, k].

    Args:
        tokens: [n, k].
    """
    index = torch.from_numpy(tokens.astype(np.int64)).to(log_softmax.device)
    return log_softmax.gather(1, index).cpu().numpy()
