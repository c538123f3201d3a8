"""Chooses the next token: temperature, min-p, top-k and top-p, then inverse transform sampling with given noise.

Draft tokens are accepted or rejected by the same probabilities. Noise is counter-based: a number depends only on (seed,
stream, position), never on earlier draws, so batching, preemption and replay do not change a sample. The generator is
SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose n-th output is a hash of
its key plus n times an odd constant.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ....schemas.sampling import SamplingParams
from ...ops.kernels import kernels_for

# Most nuclei hold fewer tokens than this, and top-k is cheaper than sorting the vocabulary.
_NUCLEUS_HEAD = 256

# Below this, division overflows and sampling equals greedy decoding anyway.
_LOWEST_TEMPERATURE = 1e-5

# Streams of a seed: the tokens of its samples, and alternative tokens sampled at positions of the prompt.
SAMPLE_STREAM, ALTERNATIVE_STREAM = 0, 1

# Further streams of a sample's key: the draft tokens, and whether each is accepted.
DRAFT_STREAM, ACCEPT_STREAM = 1, 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _LOWEST_TEMPERATURE


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of n sequences: temperature, min_p, top_p float32, [n]; top_k int64, [n]."""

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of n sequences as tensors, built once for a batch that decodes together.

    temperature: float32, [n]; 0 if greedy.
    is_greedy: bool, [n].
    min_p_rows, top_k_rows, top_p_rows: the sequences with this filter, int64, [rows].
    min_p, top_k, top_p: their values, float32, int64 and float32, [rows, 1].
    """

    temperature: Tensor
    is_greedy: Tensor
    all_greedy: bool
    min_p_rows: Tensor
    min_p: Tensor
    top_k_rows: Tensor
    top_k: Tensor
    top_p_rows: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, settings: SamplingSettings, vocab_size: int, device: torch.device) -> "SamplingTensors":
        greedy = settings.temperature < _LOWEST_TEMPERATURE
        with_min_p = np.flatnonzero((settings.min_p > 0) & ~greedy)
        with_k = np.flatnonzero((settings.top_k > 0) & (settings.top_k < vocab_size) & ~greedy)
        with_p = np.flatnonzero((settings.top_p < 1) & ~greedy)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            temperature=tensor(np.where(greedy, np.float32(0), settings.temperature)),
            is_greedy=tensor(greedy),
            all_greedy=bool(greedy.all()),
            min_p_rows=tensor(with_min_p),
            min_p=tensor(settings.min_p[with_min_p, None]),
            top_k_rows=tensor(with_k),
            top_k=tensor(settings.top_k[with_k, None]),
            top_p_rows=tensor(with_p),
            top_p=tensor(settings.top_p[with_p, None]),
        )

    @property
    def filters(self) -> bool:
        return bool(len(self.min_p_rows) or len(self.top_k_rows) or len(self.top_p_rows))


@dataclass(frozen=True)
class ChosenTokens:
    """The sampled tokens of n sequences.

    tokens: int64, [n]. logprobs: the model's at temperature 1, without filters and processors, float32, [n].
    are_finite: whether all log-probabilities are finite.
    """

    tokens: Tensor
    logprobs: Tensor
    are_finite: bool


def choose(logits: Tensor, choice: SamplingTensors, uniform: Tensor, adjusted: Tensor | None = None) -> ChosenTokens:
    """Samples one token per row of logits.

    Args:
        logits: the model's, float32, [n, vocab].
        uniform: noise in [0, 1), float32, [n].
        adjusted: processed logits to sample from, if they differ.
    """
    kernels = kernels_for(logits)
    if kernels is not None and adjusted is None and not choice.filters:
        tokens, logprobs = kernels.sample(logits, choice.temperature, uniform)
    else:
        tokens = _drawn(logits if adjusted is None else adjusted, choice, uniform)
        logprobs = logprobs_of(tokens, logits)
    return ChosenTokens(tokens, logprobs, bool(logprobs.isfinite().all()))


def logprobs_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """Returns the log-probabilities at temperature 1, float32, [n]."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)


def _drawn(logits: Tensor, choice: SamplingTensors, uniform: Tensor) -> Tensor:
    if choice.all_greedy:
        return logits.argmax(-1)
    tokens = invert_cdf(_probabilities(logits, choice), uniform[:, None]).squeeze(1)
    return torch.where(choice.is_greedy, logits.argmax(-1), tokens)


def probabilities(logits: Tensor, choice: SamplingTensors) -> Tensor:
    """Returns the probability of each token, float32, [n, vocab]; for a greedy row, 1 at the likeliest token."""
    if choice.all_greedy:
        return one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    probabilities = _probabilities(logits, choice)
    probabilities /= probabilities.sum(-1, keepdim=True)
    greedy = choice.is_greedy.nonzero().squeeze(1)
    probabilities[greedy] = one_hot(logits[greedy].argmax(-1), logits.shape[-1]).to(logits.dtype)
    return probabilities


def _probabilities(logits: Tensor, choice: SamplingTensors) -> Tensor:
    """Returns float32, [n, vocab], not normalized; undefined for greedy rows."""
    divisor = choice.temperature.masked_fill(choice.is_greedy, 1)
    probabilities = torch.softmax(logits / divisor[:, None], dim=-1)
    if len(choice.min_p_rows):
        probabilities[choice.min_p_rows] = keep_min_p(probabilities[choice.min_p_rows], choice.min_p)
    if len(choice.top_k_rows):
        probabilities[choice.top_k_rows] = keep_top_k(probabilities[choice.top_k_rows], choice.top_k)
    if len(choice.top_p_rows):
        probabilities[choice.top_p_rows] = keep_top_p(probabilities[choice.top_p_rows], choice.top_p)
    return probabilities


def keep_min_p(probabilities: Tensor, min_p: Tensor) -> Tensor:
    """Zeroes tokens less likely than min_p [n, 1] times the likeliest token of the row."""
    least = probabilities.amax(-1, keepdim=True) * min_p
    return probabilities.masked_fill(probabilities < least, 0)


def keep_top_k(probabilities: Tensor, top_k: Tensor) -> Tensor:
    """Zeroes all but the top_k [n, 1] likeliest tokens of each row."""
    likeliest = probabilities.topk(int(top_k.max())).values
    return _keep(probabilities, top_k, likeliest.gather(1, top_k - 1))


def keep_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes all but the smallest set of likeliest tokens that holds top_p [n, 1] of the row's mass."""
    mass = probabilities.sum(-1, keepdim=True) * top_p
    descending = probabilities.topk(min(_NUCLEUS_HEAD, probabilities.shape[1])).values
    if not bool((descending.sum(-1, keepdim=True) >= mass).all()):
        descending = probabilities.sort(dim=-1, descending=True).values
    before = descending.cumsum(-1) - descending
    num_kept = (before < mass).sum(-1, keepdim=True).clamp_(min=1)
    return _keep(probabilities, num_kept, descending.gather(1, num_kept - 1))


def _keep(probabilities: Tensor, num_kept: Tensor, least: Tensor) -> Tensor:
    """Zeroes all but the num_kept [n, 1] likeliest tokens of each row.

    Of several tokens with the probability of the last one, `least` [n, 1], the first stay: ties are common in low
    precision.
    """
    dropped = probabilities < least
    if bool(((~dropped).sum(-1, keepdim=True) > num_kept).any()):
        equal = probabilities == least
        room = num_kept - (probabilities > least).sum(-1, keepdim=True)
        dropped |= equal & (equal.cumsum(-1) > room)
    return probabilities.masked_fill(dropped, 0)


def invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Samples tokens by inverse transform.

    NaN weights give an arbitrary token: the caller sees its log-probability.

    Args:
        weights: need not sum to 1, float32, [n, vocab].
        uniform: float32, [n, draws].
    Returns:
        Token ids, int64, [n, draws].
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift the target to the total, beyond which no token exists.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    if weights.is_cuda:
        # A parallel prefix sum need not be monotonic, so the search may end at a token of zero weight.
        tokens = torch.where(weights.gather(1, tokens) > 0, tokens, weights.argmax(-1, keepdim=True))
    return tokens


@dataclass(frozen=True)
class VerifyResult:
    """The number of accepted draft tokens of a sequence, and the token after them."""

    num_accepted: int
    token: int


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """Draft tokens of one sequence, perhaps none."""

    tokens: np.ndarray
    """int64, [k]."""
    probabilities: Tensor
    """The draft's probability of each token of its vocabulary, float32, [k, V]."""
    vocabulary: Tensor
    """The tokens that the draft can propose, int64, [V], ascending."""


def verify(draft_tokens: DraftTokens, target: Tensor, key: np.uint64, length: int) -> VerifyResult:
    """Accepts or rejects draft tokens by rejection sampling.

    Args:
        target: the target model's probabilities at each draft token and after the last, float32, [k + 1, V].
        length: of the sequence before the draft tokens.
    """
    num, vocabulary = len(draft_tokens.tokens), draft_tokens.vocabulary
    positions = length + np.arange(num + 1)
    accept = uniforms(derive_keys(np.array([key]), ACCEPT_STREAM), positions[:num])
    tokens = torch.from_numpy(draft_tokens.tokens).to(target.device)
    number = 0
    if num:
        target_probs = target[torch.arange(num, device=target.device), tokens]
        draft_probs = draft_tokens.probabilities.gather(1, torch.searchsorted(vocabulary, tokens)[:, None]).squeeze(1)
        # The negation rejects NaN as well.
        wrong = np.flatnonzero(~(accept * draft_probs.cpu().numpy() < target_probs.cpu().numpy()))
        number = int(wrong[0]) if len(wrong) else num
    left = target[number]
    if number < num:
        left = left.index_add(0, vocabulary, draft_tokens.probabilities[number].to(left.dtype), alpha=-1).clamp_(min=0)
        left = left if float(left.sum()) > 0 else target[number]
    noise = uniforms(np.array([key]), positions[number : number + 1])
    token = invert_cdf(left[None], torch.from_numpy(noise).to(left)[:, None])
    return VerifyResult(number, int(token))


def noise_key(seed: int, *stream: int) -> int:
    """Returns the random key of one stream, such as a sample, from the low 64 bits of seed and stream."""
    key = _mix(np.array([seed & _MASK], dtype=np.uint64))
    for part in stream:
        key = _mix(key ^ (np.array([part & _MASK], dtype=np.uint64) * _GOLDEN))
    return int(key[0])


def noise_keys(seed: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """Returns noise_key(seed, stream, number) for each of the non-negative integers, uint64 of their shape."""
    return _mix(np.uint64(noise_key(seed, stream)) ^ (numbers.astype(np.uint64) * _GOLDEN))


def derive_keys(keys: np.ndarray, stream: int) -> np.ndarray:
    """Derives the keys, uint64, of another stream."""
    return _mix(keys ^ (np.array([stream], dtype=np.uint64) * _GOLDEN))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1).

    Args:
        keys: uint64.
        positions: non-negative integers; broadcast with the keys.
    """
    counter = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(keys + counter) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
