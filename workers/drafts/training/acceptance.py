"""The acceptance length of a draft: expected tokens per verification pass of the target along a given text, where each
pass begins where the one before has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..losses.draft_scores import DraftScores

KINDS = ("greedy", "sampled")
"""Kinds of survivals, named as in DraftScores."""

# Tokens per segment. Within a segment the recurrence runs token by token, over all segments at once.
_SEGMENT = 64


@dataclass(frozen=True, eq=False)
class Survivals:
    """Probabilities that the target accepts draft token k and all draft tokens before it.

    anchors: int64 [m], the positions in the draft batch after which the draft tokens were proposed.
    values: float32 [KINDS, m, depth], NaN where this rank made no proposal.
    """

    anchors: np.ndarray
    values: np.ndarray


class SurvivalTable:
    """Collects the survivals of draft tokens that are scored in any order."""

    def __init__(self, num_tokens: int, depth: int, device: torch.device) -> None:
        # The last position collects draft tokens that do not exist.
        self._values = torch.full((len(KINDS), num_tokens + 1, depth), torch.nan, device=device)

    def add(self, scores: DraftScores, label_indices: Tensor) -> None:
        """Adds the scores of some draft tokens.

        Args:
            label_indices: int64 [m, depth], see DraftPass.label_indices.
        """
        steps = torch.arange(label_indices.shape[1], device=label_indices.device).expand_as(label_indices)
        anchors = torch.where(scores.exists != 0, label_indices - steps, self._values.shape[1] - 1)
        self._values[:, anchors, steps] = torch.stack([scores.greedy, scores.sampled]).to(self._values.dtype)

    def survivals(self, tokens: np.ndarray) -> Survivals:
        """Returns what was collected. `tokens`: int64, the position in the draft batch of each of this table."""
        values = self._values[:, :-1].cpu().numpy()
        is_anchor = ~np.isnan(values).all(axis=(0, 2))
        return Survivals(tokens[is_anchor], values[:, is_anchor])


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
    can_begin, passes = _can_begin(weights, starts), np.zeros(len(KINDS))
    if can_begin.any():
        values = _merge(survivals, len(weights))
        is_missing = can_begin & np.isnan(values[0, :, 0])
        for start, length in zip(starts, lengths, strict=True):
            tokens = slice(start, start + length)
            if is_missing[tokens].any():
                values[:, tokens][:, is_missing[tokens]] = _mean(values[:, tokens])[:, None]
        passes = _num_passes(np.nan_to_num(values), can_begin)
    num_tokens = float(can_begin.sum())
    return {f"acceptance_length/{kind}": (num_tokens, float(num)) for kind, num in zip(KINDS, passes, strict=True)}


def _can_begin(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns bool [n]: True where a pass can begin, since the token's target and its own both have a weight.

    The first token of a run is False, so that runs never touch.
    """
    can_begin = weights != 0
    can_begin[1:] &= weights[:-1] != 0
    can_begin[starts] = False
    return can_begin


def _merge(survivals: Sequence[Survivals], num_tokens: int) -> np.ndarray:
    values = np.full((len(KINDS), num_tokens, survivals[0].values.shape[2]), np.nan, np.float32)
    for part in survivals:
        values[:, part.anchors] = np.fmax(values[:, part.anchors], part.values)
    return values


def _mean(survivals: np.ndarray) -> np.ndarray:
    """Returns the mean of the survivals that are not NaN, [KINDS, depth]; 0 where all are."""
    return np.nansum(survivals, axis=1) / np.maximum(1, (~np.isnan(survivals)).sum(axis=1))


def _num_passes(survivals: np.ndarray, can_begin: np.ndarray) -> np.ndarray:
    """Returns the expected number of passes over all runs, [KINDS]."""
    tokens = np.flatnonzero(can_begin)
    is_first = np.diff(tokens, prepend=-2) != 1
    ends = np.append(np.flatnonzero(is_first)[1:], len(tokens))[np.cumsum(is_first) - 1]
    return _expected_passes(_advances(survivals[:, tokens], ends))[:, is_first].sum(axis=1)


def _advances(survivals: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns [KINDS, n, depth + 1]: the probability that a pass that begins after token j advances by 1, 2, ...
    tokens.

    It is 0 where that leads to the end of the run or beyond.

    Args:
        ends: int64 [n], the ends of the tokens' runs.
    """
    padded = np.pad(survivals.astype(np.float64), ((0, 0), (0, 0), (1, 1)))
    padded[:, :, 0] = 1
    next_tokens = np.arange(len(ends))[:, None] + np.arange(1, padded.shape[2])
    return -np.diff(padded, axis=2) * (next_tokens < ends[:, None])


def _expected_passes(advances: np.ndarray) -> np.ndarray:
    """Returns the expected number of passes from token j until its run ends, [KINDS, n].

    They satisfy e_j = 1 + sum over i of advances_ji e_(j + i). The values of one segment's tokens are linear in the
    first ones of the next segment: the factors are computed for all segments at once, and then the segments are solved
    one after the other, from the last to the first.
    """
    num, max_advance = advances.shape[1:]
    size = max(_SEGMENT, max_advance)
    advances = np.pad(advances, ((0, 0), (0, -num % size), (0, 0))).reshape(len(advances), -1, size, max_advance)
    advances = np.ascontiguousarray(advances.transpose(2, 3, 0, 1))
    # [size + max_advance, max_advance + 1, KINDS, segments]: factors of the next segment's first values, then the
    # constant term.
    factors = np.zeros((size + max_advance, max_advance + 1, *advances.shape[2:]))
    factors[size:, :max_advance] = np.eye(max_advance)[:, :, None, None]
    for j in reversed(range(size)):
        np.einsum("iks,imks->mks", advances[j], factors[j + 1 : j + 1 + max_advance], out=factors[j])
        factors[j, max_advance] += 1
    firsts = np.zeros((max_advance, *advances.shape[2:-1], advances.shape[-1] + 1))
    for segment in reversed(range(advances.shape[-1])):
        of_first = factors[:max_advance, :, :, segment]
        firsts[:, :, segment] = np.einsum("jmk,mk->jk", of_first[:, :max_advance], firsts[:, :, segment + 1])
        firsts[:, :, segment] += of_first[:, max_advance]
    passes = np.einsum("jmks,mks->ksj", factors[:size, :max_advance], firsts[:, :, 1:])
    passes += factors[:size, max_advance].transpose(1, 2, 0)
    return passes.reshape(len(passes), -1)[:, :num]
