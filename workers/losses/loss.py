"""The definition of a loss: a pure function of float32 scores, and a declaration of its inputs.

A position whose weight or advantage is 0 contributes exactly 0 and no gradient, even if its scores are not finite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

Config = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
Fill = Callable[[Arrays, Config], "np.ndarray | float"]


# What a head computes for each token.
HeadName = Literal["logprobs", "values", "losses", "features"]


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The result of a loss.

    losses: float32, in the shape of the scores; their sum is the loss.
    metrics: by name, one number per position, in the same shape and without a gradient. `name:mean` is their sum
    divided by the number of counted positions of the operation. A client that splits a batch over several operations
    weights their means by the number of datums.
    ratios: by name, a numerator and a denominator, which are summed over the operation before the division.
    denominator: what "mean" divides gradients by, also summed over the operation; None = that of
    ValidatedBatch.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    ratios: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    denominator: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """A loss: function(scores [n] or [n, K], inputs of the same shape, config) -> LossOutput.

    head: the head whose scores it reads: "logprobs" of target_tokens; "values", which have no targets; "losses" of
    models that predict several tokens from each; or "features", which only stores features.
    required, optional: names of inputs in addition to target_tokens. An absent optional one is filled in.
    config: numeric options and their defaults. choices: options that are words; the first is the default.
    problem: returns what is wrong with the options, beginning with the option's name, or None.
    counted_by: the input whose zeros mark positions that do not count.
    sequence_wise: the function needs one whole sequence at a time and nothing else. Other functions get positions of
    any sequences, possibly of several operations, and must keep them independent: a wrong value at one position must
    not change another.
    allows_top_k_targets: target_tokens may be [T, K].
    """

    function: Callable[[Any, Mapping[str, Tensor], Config], LossOutput]
    required: tuple[str, ...]
    optional: Mapping[str, Fill] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problem: Callable[[Config], str | None] = lambda config: None
    counted_by: Literal["weights", "advantages"] = "advantages"
    sequence_wise: bool = False
    allows_top_k_targets: bool = False
    head: HeadName = "logprobs"


def count_problem(name: str, value: float) -> str | None:
    """Returns what is wrong with an option that counts something, or None."""
    if value >= 1 and value == int(value):
        return None
    return f"{name} is {value:g}: it must be a whole number, at least 1"
