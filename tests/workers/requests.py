"""Builds small training requests and reads them as operations."""

from collections.abc import Mapping

import numpy as np
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.batch.validated import ModelLimits, ValidatedBatch, validate_request

LIMITS = ModelLimits(vocab_size=100, max_context_length=16)


def supervised(length: int, **inputs: np.ndarray) -> Datum:
    tokens = np.arange(length, dtype=np.int32) + length
    given = {"target_tokens": tokens.astype(np.int64) + 1, "weights": np.ones(length, np.float32)}
    return Datum(tokens, given | inputs)


def sampled(length: int, **inputs: np.ndarray) -> Datum:
    tokens = np.arange(length, dtype=np.int32)
    given = {
        "target_tokens": tokens.astype(np.int64) + 1,
        "logprobs": np.full(length, -1.0, np.float32),
        "advantages": np.ones(length, np.float32),
    }
    return Datum(tokens, given | inputs)


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that do not depend on time."""
    return {name: value for name, value in metrics.items() if name != "mfu:mean"}


def read(
    *data: Datum,
    loss_fn: str = "cross_entropy",
    config: dict | None = None,
    weight: float = 1.0,
    limits: ModelLimits = LIMITS,
) -> ValidatedBatch:
    return validate_request(ForwardBackwardRequest("run", 1, data, loss_fn, config or {}, loss_weight=weight), limits)
