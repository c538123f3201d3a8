"""Counts the operations that a pass of a draft needs: its own, and those of its target.

A multiplication and its addition are two. Only products count, as in workers/shapes/layouts/flops.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...shapes.draft_sizes import Shapes, dflash_shapes, eagle3_shapes
from ...shapes.layouts.flops import ModelFlops, OwnFlops
from ..model.draft_model import DraftModel
from ..sequences.blocks import TokenRandom, sample_anchors
from ..sequences.features import Options

# Four for each feature of a pair of tokens: a query with a key, and a probability with a value.
_SCORE = 4.0
_LAYER = ("o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DraftSequence:
    """A sequence that a draft is scored on.

    weights: of the token after each, [n]. number: of the datum in its operation. is_stored: whether its features were
    captured before, so that the target does not run.
    """

    weights: np.ndarray
    number: int
    is_stored: bool


@dataclass(frozen=True)
class DraftFlops:
    """The operations of a forward pass.

    given: of products of weights with features that have no gradient. own: of the draft's other products. target: of
    the target's head for the target's own states. frozen: of the target's head for the draft's states.
    """

    given: float
    own: float
    target: float = 0.0
    frozen: float = 0.0

    def of_pass(self, trains: bool) -> float:
        """Returns them with those of the backward pass, if there is one. A product has as many for each gradient."""
        forward = self.given + self.own + self.target + self.frozen
        return forward + self.given + 2 * self.own + self.frozen if trains else forward


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
    shapes = eagle3_shapes(shape)
    # Half of the queries', keys' and values' weights multiply the embedding, which is the same in every step.
    halves = _products(shapes, "q_proj", "k_proj", "v_proj") / 2
    steps = num * depth * (halves + _products(shapes, *_LAYER))
    # A step attends to the first states of the tokens so far, and to those of its own start's steps.
    pairs = depth * num * (num + 1) // 2 + num * depth * (depth - 1) // 2
    own = num * halves + steps + _SCORE * shape.queries * pairs + predictions * _products(shapes, "lm_head")
    return DraftFlops(num * _products(shapes, "fc"), own, target=of_target)


def _dflash(draft: DraftModel, target: ModelFlops, sequence: DraftSequence, options: Options) -> DraftFlops:
    shape, num = draft.shape, len(sequence.weights)
    assert shape.block_size is not None
    size = shape.block_size
    random = TokenRandom(int(options["seed"]), sequence.number)
    anchors = sample_anchors(sequence.weights, random, int(options["num_anchors"]))
    pairs = size * int((anchors + size).sum())  # the tokens before the anchor, and the whole block
    predictions = int(np.minimum(num - anchors, size - 1).sum())
    frozen = target.head(predictions, _own_of(draft))
    shapes = dflash_shapes(shape)
    # All layers read all tokens' features and run for the tokens of blocks.
    context = num * _products(shapes, "k_proj", "v_proj")
    rows = len(anchors) * size * _products(shapes, "q_proj", "k_proj", "v_proj", *_LAYER)
    own = context + rows + _SCORE * shape.layers * shape.queries * pairs
    return DraftFlops(num * _products(shapes, "fc"), own, frozen=frozen)


def _products(shapes: Shapes, *names: str) -> float:
    """Returns the operations for each token of the modules of these names, in all layers."""
    return 2.0 * sum(prod(shape) for module, shape in shapes.items() if module.split(".")[-1] in names)


def _own_of(draft: DraftModel) -> OwnFlops:
    """Returns what the target's adapter adds to its output head."""
    return (draft.target.flops if draft.target is not None else None) or OwnFlops()
