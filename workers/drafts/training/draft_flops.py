"""Counts the operations of a draft's forward pass over a sequence. Imports no torch.

A multiplication and its addition are two. Only products count, as in ../flops.py.
"""

from dataclasses import dataclass
from math import prod

from ...shapes.draft_sizes import DraftSizes, Shapes

# Four for each feature of a pair of tokens: a query with a key, and a probability with a value.
_SCORE = 4.0

_LAYER = ("o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DraftFlops:
    """The operations of a forward pass.

    given: of products of weights with features that have no gradient. own: of the draft's other products. again: of
    those, what recomputation repeats. target: of the target's head for the target's own states. frozen: of the target's
    head for the draft's states.
    """

    given: float
    own: float
    again: float = 0.0
    target: float = 0.0
    frozen: float = 0.0

    def of_pass(self, trains: bool, recomputes: bool = False) -> float:
        """Returns them with those of the backward pass, if there is one. A product has as many for each gradient."""
        forward = self.given + self.own + self.target + self.frozen
        if not trains:
            return forward
        return forward + self.given + 2 * self.own + self.frozen + (self.again if recomputes else 0.0)


def eagle3_flops(
    sizes: DraftSizes, shapes: Shapes, num_tokens: int, depth: int, num_predictions: int, target: float, tp: int = 1
) -> DraftFlops:
    """Returns the operations of a rank along tp. Each token is a start, from which `depth` steps run.

    Args:
        shapes: the rank's, by module.
        num_predictions: that are scored by all ranks along tp. target: see DraftFlops.
    """
    # Half of the queries', keys' and values' weights multiply the embedding, which is the same in every step.
    halves = _products(shapes, "q_proj", "k_proj", "v_proj") / 2
    steps = num_tokens * depth * (halves + _products(shapes, *_LAYER))
    # A step attends to the first states of the tokens so far, and to those of its own start's steps.
    pairs = depth * num_tokens * (num_tokens + 1) // 2 + num_tokens * depth * (depth - 1) // 2
    scores = _SCORE * sizes.queries / tp * pairs
    own = num_tokens * halves + steps + scores + num_predictions * _products(shapes, "lm_head") / tp
    return DraftFlops(num_tokens * _products(shapes, "fc"), own, steps, target=target)


def dflash_flops(
    sizes: DraftSizes, shapes: Shapes, num_tokens: int, block_size: int, num_blocks: int, num_pairs: int, frozen: float,
    tp: int = 1,
) -> DraftFlops:  # fmt: skip
    """Returns the operations of a rank along tp. All layers read all tokens' features and run for the tokens of blocks.

    Args:
        shapes: the rank's, by module.
        num_pairs: of a token of a block and one that it attends to. frozen: see DraftFlops.
    """
    context = num_tokens * _products(shapes, "k_proj", "v_proj")
    rows = num_blocks * block_size * _products(shapes, "q_proj", "k_proj", "v_proj", *_LAYER)
    own = context + rows + _SCORE * sizes.layers * sizes.queries / tp * num_pairs
    return DraftFlops(num_tokens * _products(shapes, "fc"), own, frozen=frozen)


def _products(shapes: Shapes, *names: str) -> float:
    """Returns the operations for each token of the modules of these names, in all layers."""
    return 2.0 * sum(prod(shape) for module, shape in shapes.items() if module.split(".")[-1] in names)
