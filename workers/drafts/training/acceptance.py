"""The walk of a target along a text whose tokens a draft guesses: each pass begins where the one before has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...losses.draft_scores import DraftScores

KINDS = ("greedy", "sampled")
"""Of survivals, as in DraftScores."""

# Tokens whose passes are counted one after the other; of all such segments at once.
_SEGMENT = 64


@dataclass(frozen=True, eq=False)
class Survivals:
    """Of guesses that are made behind some tokens: the probability that guess k and all before it from there are right.

    tokens: int64 [m], their numbers in the lesson. values: float32 [KINDS, m, depth]; NaN of what was not guessed here.
    """

    tokens: np.ndarray
    values: np.ndarray


class SurvivalBook:
    """The survivals of guesses that are scored in any order."""

    def __init__(self, num_tokens: int, depth: int, device: torch.device) -> None:
        # The last one is for guesses that there are none of.
        self._values = torch.full((len(KINDS), num_tokens + 1, depth), torch.nan, device=device)

    def add(self, scores: DraftScores, places: Tensor) -> None:
        """places: int64 [m, depth], behind which tokens stands what was guessed: k tokens further than the first guess
        from the same token, which stands behind that one."""
        numbers = torch.arange(places.shape[1], device=places.device).expand_as(places)
        behind = torch.where(scores.exists != 0, places - numbers, self._values.shape[1] - 1)
        self._values[:, behind, numbers] = torch.stack([scores.greedy, scores.sampled]).to(self._values.dtype)

    def of(self, tokens: np.ndarray) -> Survivals:
        """tokens: int64 [num_tokens], their numbers in the lesson."""
        values = self._values[:, :-1].cpu().numpy()
        known = ~np.isnan(values).all(axis=(0, 2))
        return Survivals(tokens[known], values[:, known])


def acceptance_lengths(
    survivals: Sequence[Survivals], weights: np.ndarray, lengths: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """By name, the tokens that passes give, and how many passes these take: 0 of 0 where no neighbours have weights.

    survivals: of ranks; no two know of the same guess. weights: [n], of what stands behind the n tokens of sequences of
    these lengths. Passes go along runs of neighbours with a weight, as sampling does: the first of a run comes with
    what is before it, and none is guessed beyond the last. Where nothing was guessed behind one of a sequence's tokens,
    the mean over the others stands for it.
    """
    starts = np.cumsum((0, *lengths[:-1]))
    follows, passes = _that_follow(weights, starts), np.zeros(len(KINDS))
    if follows.any():
        values = _joined(survivals, len(weights))
        is_missing = follows & np.isnan(values[0, :, 0])
        for start, length in zip(starts, lengths, strict=True):
            tokens = slice(start, start + length)
            if is_missing[tokens].any():
                values[:, tokens][:, is_missing[tokens]] = _mean(values[:, tokens])[:, None]
        passes = _num_passes(np.nan_to_num(values), follows)
    num_tokens = float(follows.sum())
    return {f"acceptance_length/{kind}": (num_tokens, float(num)) for kind, num in zip(KINDS, passes, strict=True)}


def _that_follow(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """bool [n]: tokens behind which passes may begin: the next one has a weight, as has their own. The first of a run
    does not follow, so that runs never touch."""
    follows = weights != 0
    follows[1:] &= weights[:-1] != 0
    follows[starts] = False
    return follows


def _joined(survivals: Sequence[Survivals], num_tokens: int) -> np.ndarray:
    """[KINDS, num_tokens, depth]"""
    values = np.full((len(KINDS), num_tokens, survivals[0].values.shape[2]), np.nan, np.float32)
    for part in survivals:
        values[:, part.tokens] = np.fmax(values[:, part.tokens], part.values)
    return values


def _mean(survivals: np.ndarray) -> np.ndarray:
    """[KINDS, depth], of what is known; 0 of what is not."""
    return np.nansum(survivals, axis=1) / np.maximum(1, (~np.isnan(survivals)).sum(axis=1))


def _num_passes(survivals: np.ndarray, follows: np.ndarray) -> np.ndarray:
    """[KINDS]: over all runs, passes from the first one until the run has been left."""
    places = np.flatnonzero(follows)
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
    # [size + reach, reach + 1, KINDS, segments]: by the first ones of the next segment, and last what is always added.
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
