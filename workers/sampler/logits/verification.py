"""Accepts or rejects draft tokens by rejection sampling."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .noise import ACCEPT_STREAM, derive_keys, uniforms
from .token_choice import invert_cdf


@dataclass(frozen=True)
class VerifyResult:
    """The number of accepted draft tokens of a sequence, and the token after them."""

    num_accepted: int
    token: int


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """Draft tokens.

    tokens: int64, [k].
    probabilities: the draft's probability of each token of its vocabulary, float32, [k, V]; None if there are no
    tokens.
    """

    tokens: np.ndarray
    probabilities: Tensor | None


def verify(draft_tokens: DraftTokens, target: Tensor, vocabulary: Tensor, key: np.uint64, length: int) -> VerifyResult:
    """Accepts or rejects draft tokens by rejection sampling.

    Args:
        target: the target model's probabilities at each draft token and after the last, float32, [k + 1, V].
        vocabulary: the tokens that the draft can propose, int64.
        length: of the sequence before the draft tokens.
    """
    num = len(draft_tokens.tokens)
    positions = length + np.arange(num + 1)
    accept = uniforms(derive_keys(np.array([key]), ACCEPT_STREAM), positions[:num])
    tokens = torch.from_numpy(draft_tokens.tokens).to(target.device)
    number = 0
    if num:
        assert draft_tokens.probabilities is not None
        target_probs = target[torch.arange(num, device=target.device), tokens]
        draft_probs = draft_tokens.probabilities.gather(1, torch.searchsorted(vocabulary, tokens)[:, None]).squeeze(1)
        # The negation rejects NaN as well.
        wrong = np.flatnonzero(~(accept * draft_probs.cpu().numpy() < target_probs.cpu().numpy()))
        number = int(wrong[0]) if len(wrong) else num
    left = target[number]
    if number < num:
        assert draft_tokens.probabilities is not None
        left = left.index_add(0, vocabulary, draft_tokens.probabilities[number].to(left.dtype), alpha=-1).clamp_(min=0)
        left = left if float(left.sum()) > 0 else target[number]
    noise = uniforms(np.array([key]), positions[number : number + 1])
    token = invert_cdf(left[None], torch.from_numpy(noise).to(left)[:, None])
    return VerifyResult(number, int(token))
