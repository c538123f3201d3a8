"""The walk of a target along a text whose tokens a draft guesses: each pass begins where the one before has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .scores import DraftScores

KINDS = ("greedy", "sampled")
"""Of survivals, as in DraftScores."""

# Tokens whose passes are counted one after the other; of all such segments at once.
_SEGMENT = 64


@dataclass(frozen=True, eq=False)
class Survivals:
    """What is known of m tokens: values float32 [KINDS, m, depth], with which probability guess k that is
    made behind a token survives, with those before it from there; NaN where it was not made."""

    tokens: np.ndarray
    values: np.ndarray

    def along(self, num_tokens: int) -> np.ndarray:
        """Of all tokens: [KINDS, num_tokens, depth]."""
        whole = np.full((len(KINDS), num_tokens, self.values.shape[2]), np.nan, np.float32)
        whole[:, self.tokens] = self.values
        return whole


class SurvivalBook:
    """The survivals of guesses that are scored in any order."""

    def __init__(self, num_tokens: int, depth: int, device: torch.device) -> None:
        # The last one is for guesses that there are none of.
        self._values = torch.full((len(KINDS), num_tokens + 1, depth), torch.nan, device=device)

    def add(self, scores: DraftScores, places: Tensor) -> None:
        """places: int64 [m, depth], behind which tokens stands what was guessed."""
        numbers = torch.arange(places.shape[1], device=places.device).expand_as(places)
        behind = torch.where(scores.exists != 0, places - numbers, self._values.shape[1] - 1)
        self._values[:, behind, numbers] = torch.stack([scores.greedy, scores.sampled]).to(self._values.dtype)

    def of(self, tokens: np.ndarray) -> Survivals:
        """tokens: int64 [num_tokens], what they are called."""
        values = self._values[:, :-1].cpu().numpy()
        known = ~np.isnan(values).all(axis=(0, 2))
        return Survivals(tokens[known], values[:, known])


def acceptance_lengths(
    survivals: Sequence[Survivals], weights: np.ndarray, lengths: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """By name, the tokens that passes give, and how many passes these take.

    survivals: parts of all. weights: [n], of what stands behind the n tokens of sequences of these lengths. Sampling is
    followed: of neighbours with a weight the first comes with what is before them, and guesses end with the last. In
    sequences that guesses are not known of behind each token, passes begin behind all that are known as often.
    """
    follows = _that_follow(weights, lengths)
    values = np.fmax.reduce([each.along(len(weights)) for each in survivals])
    is_known, is_walked, passes = ~np.isnan(values[0, :, 0]), follows.copy(), np.zeros(len(KINDS))
    for start, length in zip(np.cumsum((0, *lengths[:-1])), lengths, strict=True):
        tokens = slice(start, start + length)
        if (follows[tokens] & ~is_known[tokens]).any():
            known = values[:, tokens][:, is_known[tokens] & (weights[tokens] != 0)]
            passes += follows[tokens].sum() / (1 + np.nansum(known, axis=(1, 2)) / max(1, known.shape[1]))
            is_walked[tokens] = False
    passes += _num_passes(np.nan_to_num(values), is_walked)
    num_tokens = float(follows.sum())
    return {f"acceptance_length/{kind}": (num_tokens, float(num)) for kind, num in zip(KINDS, passes, strict=True)}


def _that_follow(weights: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """bool [n]: tokens of which the next one has a weight, as has their own."""
    follows = weights != 0
    follows[1:] &= weights[:-1] != 0
    follows[np.cumsum((0, *lengths[:-1]))] = False
    return follows


def _num_passes(survivals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[KINDS]: over all runs of neighbours that count, passes from the first one until the last has been left."""
    places = np.flatnonzero(counts)
    is_first = np.diff(places, prepend=-2) != 1
    ends = np.append(np.flatnonzero(is_first)[1:], len(places))[np.cumsum(is_first) - 1]
    return _expected(_steps(survivals[:, places], ends))[:, is_first].sum(axis=1)


def _steps(survivals: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of n tokens, [KINDS, n, depth + 1]: the probability that a pass that begins behind a token goes on by 1, 2, ...
    tokens, 0 where this is to its run's end, or beyond. ends: int64 [n]."""
    padded = np.pad(survivals.astype(np.float64), ((0, 0), (0, 0), (1, 1)))
    padded[:, :, 0] = 1
    leads_to = np.arange(len(ends))[:, None] + np.arange(1, padded.shape[2])
    return -np.diff(padded, axis=2) * (leads_to < ends[:, None])


def _expected(steps: np.ndarray) -> np.ndarray:
    """[KINDS, n]: e_j = 1 + sum over i of steps_ji e_(j + i), passes from behind token j until its run has been left.

    Those of a segment's tokens are linear in the first ones of the next segment: by what factors is found for all
    segments at once, and then one goes after the other.
    """
    num, reach = steps.shape[1:]
    size = max(_SEGMENT, reach)
    steps = np.pad(steps, ((0, 0), (0, -num % size), (0, 0))).reshape(len(steps), -1, size, reach)
    steps = np.ascontiguousarray(steps.transpose(2, 3, 0, 1))
    # The last factor is of nothing: [size + reach, reach + 1, KINDS, segments].
    factors = np.zeros((size + reach, reach + 1, *steps.shape[2:]))
    factors[size:, :reach] = np.eye(reach)[:, :, None, None]
    for j in reversed(range(size)):
        np.einsum("iks,imks->mks", steps[j], factors[j + 1 : j + 1 + reach], out=factors[j])
        factors[j, reach] += 1
    firsts = np.zeros((reach, *steps.shape[2:-1], steps.shape[-1] + 1))
    for segment in reversed(range(steps.shape[-1])):
        of_first = factors[:reach, :, :, segment]
        firsts[:, :, segment] = np.einsum("jmk,mk->jk", of_first[:, :reach], firsts[:, :, segment + 1])
        firsts[:, :, segment] += of_first[:, reach]
    found = np.einsum("jmks,mks->ksj", factors[:size, :reach], firsts[:, :, 1:])
    found += factors[:size, reach].transpose(1, 2, 0)
    return found.reshape(len(found), -1)[:, :num]
