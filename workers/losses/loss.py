"""What a loss is: a pure function of float32 scores, and a declaration of what it reads.

A position whose weight or advantage is 0 contributes exactly 0 and no gradient, whatever its scores are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

Config = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
Fill = Callable[[Arrays, Config], "np.ndarray | float"]


# What a head gives for each token.
Scores = Literal["logprobs", "values", "losses", "features"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """losses: float32 of the shape of the scores; their sum is the loss.

    metrics: name -> a number per position, of the same shape and without a gradient; `name:mean` is their sum divided
    by the number of counted positions of the operation. ratios: name -> numerator and denominator, one number each,
    which are summed over the operation before they are divided. denominator: what "mean" divides gradients by, where
    only the scores tell; it is summed, too.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    ratios: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    denominator: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """function(scores [n] or [n, K], inputs of the same shape, config) -> LossOutput.

    scores: of which head: log-probabilities of target_tokens, or values, which have no targets; or the losses of a
    draft, whose function is given DraftScores and the weights of what was guessed, all [m, guesses]; or nothing of
    one, but where features were put.
    required, optional: names of inputs besides target_tokens; an optional one that is absent is filled.
    config: numbers and their defaults. choices: of those that are words, the first is the default. counted_by: the
    input whose zeros do not count.
    sequence_wise: the function must see one whole sequence and nothing else at a time. Other functions see positions
    of any sequences, of several operations too, and keep them apart: what is wrong at one changes no other.
    many_targets: target_tokens may be [T, K].
    """

    function: Callable[[Any, Mapping[str, Tensor], Config], LossOutput]
    required: tuple[str, ...]
    optional: Mapping[str, Fill] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counted_by: Literal["weights", "advantages"] = "advantages"
    sequence_wise: bool = False
    many_targets: bool = False
    scores: Scores = "logprobs"

    def denominator(self, counts: np.ndarray) -> float:
        """What "mean" divides gradients by: the summed weights, or the number of positions with an advantage; 0 where
        the scores tell."""
        if self.scores == "losses":
            return 0.0
        return float(counts.sum(dtype=np.float64)) if self.counted_by == "weights" else float(np.count_nonzero(counts))
