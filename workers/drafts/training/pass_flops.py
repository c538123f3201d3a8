"""Counts the operations that a pass of a draft needs: its own, and those of its target.

A multiplication and its addition are two. Only products count, as in workers/shapes/layouts/flops.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...shapes.draft_sizes import dflash_shapes, eagle3_shapes
from ...shapes.layouts.flops import ModelFlops, OwnFlops
from ..draft_model import DraftModel
from ..sequences.blocks import TokenRandom, sample_anchors
from ..sequences.labels import Options
from .draft_flops import DraftFlops, dflash_flops, eagle3_flops


@dataclass(frozen=True)
class DraftSequence:
    """A sequence that a draft is scored on.

    weights: of the token after each, [n]. number: of the datum in its operation. is_stored: whether its features were
    captured before, so that the target does not run.
    """

    weights: np.ndarray
    number: int
    is_stored: bool


def draft_pass_flops(
    draft: DraftModel, target: ModelFlops, sequences: Sequence[DraftSequence], options: Options, trains: bool
) -> float:
    """Returns the operations of a pass over these sequences. target: counts for the base model."""
    forward_of = _eagle3 if draft.draft.algorithm == "eagle3" else _dflash
    lengths = np.array([len(each.weights) for each in sequences if not each.is_stored], np.int64)
    of_adapter = draft.target.flops if draft.target is not None else None
    trunk = target.trunk(lengths) + (0.0 if of_adapter is None else of_adapter.trunk * int(lengths.sum()))
    return trunk + sum(forward_of(draft, target, each, options).of_pass(trains) for each in sequences)


def _eagle3(draft: DraftModel, target: ModelFlops, sequence: DraftSequence, options: Options) -> DraftFlops:
    shape, num, depth = draft.shape, len(sequence.weights), int(options["ttt_length"])
    rows = np.flatnonzero(sequence.weights)
    predictions = int(np.minimum(rows, depth).sum())
    form = draft.target_form
    has_logits = sequence.is_stored and form is not None and form.stores_logits
    of_target = 0.0 if has_logits else target.head(len(rows), _own_of(draft))
    return eagle3_flops(shape, eagle3_shapes(shape), num, depth, predictions, of_target)


def _dflash(draft: DraftModel, target: ModelFlops, sequence: DraftSequence, options: Options) -> DraftFlops:
    shape, num = draft.shape, len(sequence.weights)
    assert shape.block_size is not None
    size = shape.block_size
    random = TokenRandom(int(options["seed"]), sequence.number)
    anchors = sample_anchors(sequence.weights, random, int(options["num_anchors"]))
    pairs = size * int((anchors + size).sum())  # the tokens before the anchor, and the whole block
    predictions = int(np.minimum(num - anchors, size - 1).sum())
    frozen = target.head(predictions, _own_of(draft))
    return dflash_flops(shape, dflash_shapes(shape), num, size, len(anchors), pairs, frozen)


def _own_of(draft: DraftModel) -> OwnFlops:
    """Returns what the target's adapter adds to its output head."""
    return (draft.target.flops if draft.target is not None else None) or OwnFlops()
