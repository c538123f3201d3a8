"""What a loss is: a pure function of float32 scores, and a declaration of what it reads.

A position whose weight or advantage is 0 contributes exactly 0 and no gradient, whatever its scores are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

Config = Mapping[str, float]
Arrays = Mapping[str, np.ndarray]
Fill = Callable[[Arrays, Config], "np.ndarray | float"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """losses: float32 of the shape of the scores; their sum is the loss.

    metrics: name -> a number per position, of the same shape and without a gradient; `name:mean` is their sum divided
    by the number of counted positions of the operation.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """function(scores [n] or [n, K], inputs of the same shape, config) -> LossOutput.

    scores: of which head: log-probabilities of target_tokens, or values, which have no targets.
    required, optional: names of inputs besides target_tokens; an optional one that is absent is filled.
    config: keys and their defaults. counted_by: the input whose zeros do not count.
    sequence_wise: the function must see one whole sequence and nothing else at a time. Other functions see positions
    of any sequences, of several operations too, and keep them apart: what is wrong at one changes no other.
    many_targets: target_tokens may be [T, K].
    """

    function: Callable[[Tensor, Mapping[str, Tensor], Config], LossOutput]
    required: tuple[str, ...]
    optional: Mapping[str, Fill] = field(default_factory=dict)
    config: Config = field(default_factory=dict)
    counted_by: Literal["weights", "advantages"] = "advantages"
    sequence_wise: bool = False
    many_targets: bool = False
    scores: Literal["logprobs", "values"] = "logprobs"

    def denominator(self, counts: np.ndarray) -> float:
        """What "mean" divides gradients by: the summed weights, or the number of positions with an advantage."""
        return float(counts.sum(dtype=np.float64)) if self.counted_by == "weights" else float(np.count_nonzero(counts))
