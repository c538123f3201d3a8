"""The capture operation, which has no loss: a pass of a draft that stores the target's features for later passes and
predicts nothing."""

from collections.abc import Mapping

from torch import Tensor

from ...losses.loss import Config, Loss, LossOutput


def capture(scores: object, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    raise AssertionError("a capture pass computes no loss")


CAPTURE = Loss(
    capture, required=(), optional={"weights": lambda inputs, config: 1.0}, counted_by="weights", scores="features"
)
