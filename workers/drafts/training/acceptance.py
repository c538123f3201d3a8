"""The acceptance length of a draft: expected tokens per verification pass of the target along a known text, where each
pass begins where the one before has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...losses.draft_scores import DraftScores

KINDS = ("greedy", "sampled")
"""Kinds of survivals, named as in DraftScores."""

# Tokens per segment. Within a segment the recurrence runs token by token, over all segments at once.
_SEGMENT = 64


@dataclass(frozen=True, eq=False)
class Survivals:
    """Probabilities that the target accepts draft token k and all draft tokens before it.

    tokens: int64 [m], the positions in the lesson after which the draft tokens were proposed.
    values: float32 [KINDS, m, depth], NaN where this rank made no proposal.
    """

    tokens: np.ndarray
    values: np.ndarray


class SurvivalTable:
    """Collects the survivals of draft tokens that are scored in any order."""

    def __init__(self, num_tokens: int, depth: int, device: torch.device) -> None:
        # The last position collects draft tokens that do not exist.
        self._values = torch.full((len(KINDS), num_tokens + 1, depth), torch.nan, device=device)

    def add(self, scores: DraftScores, places: Tensor) -> None:
        """Adds the scores of some draft tokens.

        Args:
            places: int64 [m, depth], the position after which each draft token stands: that of the first draft token of
                the same anchor, plus k.
        """
        numbers = torch.arange(places.shape[1], device=places.device).expand_as(places)
        behind = torch.where(scores.exists != 0, places - numbers, self._values.shape[1] - 1)
        self._values[:, behind, numbers] = torch.stack([scores.greedy, scores.sampled]).to(self._values.dtype)

    def of(self, tokens: np.ndarray) -> Survivals:
        """Returns what was collected. `tokens`, int64 [num_tokens], maps positions of this book to positions in the
        lesson."""
        values = self._values[:, :-1].cpu().numpy()
        known = ~np.isnan(values).all(axis=(0, 2))
        return Survivals(tokens[known], values[:, known])


def acceptance_lengths(
    survivals: Sequence[Survivals], weights: np.ndarray, lengths: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """Returns by metric name the number of accepted tokens and of the passes they take, (0, 0) if no two neighbouring
    tokens have weights.

    Passes go along runs of neighbouring tokens with a weight, as sampling does: the first token of a run is the result
    of the prefill before it, and nothing is proposed beyond the last one. Where no draft token was scored after a
    token, the mean over the other tokens of its sequence is used.

    Args:
        survivals: one for each rank; no draft token is in two of them.
        weights: [n], the weights of the targets of the n tokens.
        lengths: of the sequences, n in sum.
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
    """Returns bool [n]: True where a pass may begin, since the token's target and its own both have a weight.

    The first token of a run is False, so that runs never touch.
    """
    follows = weights != 0
    follows[1:] &= weights[:-1] != 0
    follows[starts] = False
    return follows


def _joined(survivals: Sequence[Survivals], num_tokens: int) -> np.ndarray:
    values = np.full((len(KINDS), num_tokens, survivals[0].values.shape[2]), np.nan, np.float32)
    for part in survivals:
        values[:, part.tokens] = np.fmax(values[:, part.tokens], part.values)
    return values


def _mean(survivals: np.ndarray) -> np.ndarray:
    """Returns the mean of the known survivals, [KINDS, depth]; 0 where none is known."""
    return np.nansum(survivals, axis=1) / np.maximum(1, (~np.isnan(survivals)).sum(axis=1))


def _num_passes(survivals: np.ndarray, follows: np.ndarray) -> np.ndarray:
    """Returns the expected number of passes over all runs, [KINDS]."""
    places = np.flatnonzero(follows)
    is_first = np.diff(places, prepend=-2) != 1
    ends = np.append(np.flatnonzero(is_first)[1:], len(places))[np.cumsum(is_first) - 1]
    return _expected(_steps(survivals[:, places], ends))[:, is_first].sum(axis=1)


def _steps(survivals: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns [KINDS, n, depth + 1]: the probability that a pass that begins after token j advances by 1, 2, ...
    tokens.

    It is 0 where that leads to the end of the run or beyond.

    Args:
        ends: int64 [n], the ends of the tokens' runs.
    """
    padded = np.pad(survivals.astype(np.float64), ((0, 0), (0, 0), (1, 1)))
    padded[:, :, 0] = 1
    leads_to = np.arange(len(ends))[:, None] + np.arange(1, padded.shape[2])
    return -np.diff(padded, axis=2) * (leads_to < ends[:, None])


def _expected(steps: np.ndarray) -> np.ndarray:
    """Returns the expected number of passes from token j until its run ends, [KINDS, n].

    They satisfy e_j = 1 + sum over i of steps_ji e_(j + i). The values of one segment's tokens are linear in the first
    ones of the next segment: the factors are computed for all segments at once, and then the segments are solved one
    after the other, from the last to the first.
    """
    num, reach = steps.shape[1:]
    size = max(_SEGMENT, reach)
    steps = np.pad(steps, ((0, 0), (0, -num % size), (0, 0))).reshape(len(steps), -1, size, reach)
    steps = np.ascontiguousarray(steps.transpose(2, 3, 0, 1))
    # [size + reach, reach + 1, KINDS, segments]: factors of the next segment's first values, then the constant term.
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
