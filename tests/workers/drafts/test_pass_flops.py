"""The operations that a pass of a draft reports are those of its products."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import Algorithm
from trainhouse.workers.drafts.training.pass_flops import DraftSequence, draft_pass_flops
from trainhouse.workers.shapes.draft_sizes import DraftSizes

SIZES = DraftSizes(64, 192, 4, 2, 16, layers=2, captured=3, vocabulary=400, target_vocabulary=512)
TOKENS, BLOCK, HEAD, TRUNK = 32, 4, 10.0**6, 10.0**9
QUERIES, KEYS, HIDDEN, MLP = 64, 32, 64, 192
LAYER = QUERIES * HIDDEN + 3 * HIDDEN * MLP
GIVEN = TOKENS * 3 * HIDDEN * HIDDEN  # captured layers, joined: products without a gradient of their input


def eagle3() -> tuple[float, float, float]:
    """Returns given and own products, and those of the target's head. Each token is a start with three steps."""
    half = HIDDEN * (QUERIES + 2 * KEYS)
    pairs = 3 * TOKENS * (TOKENS + 1) / 2 + TOKENS * (0 + 1 + 2)
    predictions = sum(min(row, 3) for row in range(TOKENS))
    own = TOKENS * half + 3 * TOKENS * (half + LAYER) + 2 * QUERIES * pairs + predictions * 400 * HIDDEN
    return GIVEN, own, 0.0


def dflash() -> tuple[float, float, float]:
    """Each token but the last ones is an anchor, whose block sees the tokens before it and itself."""
    anchors, projected = range(TOKENS), HIDDEN * (QUERIES + 2 * KEYS)
    pairs = sum(BLOCK * (anchor + BLOCK) for anchor in anchors)
    own = 2 * (TOKENS * 2 * KEYS * HIDDEN + TOKENS * BLOCK * (projected + LAYER) + 2 * QUERIES * pairs)
    return GIVEN, own, HEAD * sum(min(TOKENS - anchor, BLOCK - 1) for anchor in anchors)


@pytest.mark.parametrize(("algorithm", "products"), [("eagle3", eagle3()), ("dflash", dflash())])
def test_operations_of_a_pass_are_those_of_its_products(
    algorithm: Algorithm, products: tuple[float, float, float]
) -> None:
    shape: Any = SimpleNamespace(**vars(SIZES), queries=QUERIES, keys=KEYS, block_size=BLOCK)
    draft: Any = SimpleNamespace(draft=SimpleNamespace(algorithm=algorithm), shape=shape, target=None, target_form=None)
    target: Any = SimpleNamespace(trunk=lambda lengths: TRUNK * len(lengths), head=lambda number, own: HEAD * number)
    sequence, options = DraftSequence(np.ones(TOKENS), 0, False), {"ttt_length": 3, "num_anchors": 512, "seed": 0}
    given, own, frozen = products
    of_target = TRUNK + (HEAD * TOKENS if algorithm == "eagle3" else 0.0)
    forward, trained = (draft_pass_flops(draft, target, [sequence], options, trains) for trains in (False, True))
    assert forward == pytest.approx(of_target + 2 * (given + own) + frozen)
    assert trained == pytest.approx(of_target + 2 * (2 * given + 3 * own) + 2 * frozen)
