"""Describes the error that stopped the operations of a round when it is unknown which of them caused it."""

import traceback
from dataclasses import dataclass

import torch

from ...schemas.errors import Category, OperationError
from ..batch.validated import ValidatedBatch
from ..resources.machine import gigabytes
from ..resources.memory import available_bytes, is_out_of_memory


@dataclass(frozen=True)
class BatchFailure:
    """The error that stopped a micro-batch.

    traceback: the traceback of an unexpected error, for the log.
    """

    message: str
    category: Category = "server"
    out_of_memory: bool = False
    traceback: str | None = None


def batch_failure_of(error: Exception) -> BatchFailure:
    """Describes the error without holding on to it: the frames of its traceback hold tensors."""
    if isinstance(error, OperationError):
        return BatchFailure(error.message, error.category)
    message = f"{type(error).__name__}: {error}"
    return BatchFailure(message, out_of_memory=is_out_of_memory(error), traceback=traceback.format_exc())


def out_of_memory_message(operation: ValidatedBatch, configured: int, tried: int, device: torch.device) -> str:
    """Returns the message for an operation that does not fit into device memory.

    Args:
        configured: the configured size of a micro-batch, in tokens.
        tried: the size of the last attempt, in tokens.
    """
    free = available_bytes(device)
    room = f"{device} has {gigabytes(free) if free is not None else 'an unknown amount'} free"
    lengths = [len(example.tokens) for example in operation.examples]
    if not lengths:
        return (
            f"out of memory: no room for gradients, {room}: serve this model with fewer --adapter-slots or --full-slots"
        )
    longest = max(lengths)
    largest, datum = min(sum(lengths), max(tried, longest)), operation.datum_indices[lengths.index(longest)]
    return (
        f"out of memory: a micro-batch of {largest} tokens does not fit (micro_batch_tokens is {configured}; datum"
        f" {datum} alone has {longest}), {room}: send shorter sequences, or serve this model with more memory"
    )
