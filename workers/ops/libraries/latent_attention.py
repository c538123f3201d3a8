"""Adapts FlashMLA's kernel for decode steps of latent attention."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from .probe import Comparison, probed, random_on, report_misfit

# The kernel reads the cache in blocks of so many tokens, and knows vectors of one size, whose first part is the value.
BLOCK = 64
KEY_DIM = 576
VALUE_DIM = 512

_CAPABILITY = (9, 0)


@dataclass(frozen=True, eq=False)
class LatentStep:
    """The sequences of a decode step, for all of its layers.

    blocks: the places in the cache of each sequence's blocks, int32 [n, capacity / BLOCK]. lengths: the tokens that it
    attends to, int32 [n]. schedules: how the kernel divides the work, by the number of heads.
    """

    blocks: Tensor
    lengths: Tensor
    schedules: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    @staticmethod
    def of(slots: Tensor, lengths: Tensor, capacity: int) -> "LatentStep":
        """Takes the slot of each sequence, of `capacity` tokens, and the cached tokens without the new one; int64."""
        per_slot = capacity // BLOCK
        within = torch.arange(per_slot, dtype=torch.int32, device=slots.device)
        return LatentStep(slots.int().unsqueeze(1) * per_slot + within, lengths.int() + 1)


class FlashMla:
    """Attends from a token of each sequence to latent vectors in slots."""

    NAME: ClassVar[str] = "FlashMLA"
    TASK: ClassVar[str] = "decode steps of latent attention"

    def __init__(self) -> None:
        from flash_mla import (  # pyright: ignore[reportMissingImports]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )

        self._attend, self._schedule = flash_mla_with_kvcache, get_mla_metadata

    @staticmethod
    def misfit(key: Tensor, capacity: int) -> str | None:
        """Returns why the library cannot attend to keys like this [n, 1, size], if it cannot."""
        if key.dtype != torch.bfloat16:
            return f"keys are {key.dtype}, not bfloat16"
        if key.shape[1:] != (1, KEY_DIM):
            return f"latent vectors have {key.shape[-1]} numbers, not {KEY_DIM}"
        return f"slots of {capacity} tokens are no multiple of {BLOCK}" if capacity % BLOCK else None

    def attend(self, query: Tensor, cached: Tensor, step: LatentStep, scaling: float) -> Tensor:
        """Returns the attention output [n, heads, VALUE_DIM].

        Args:
            query: [n, heads, KEY_DIM].
            cached: contiguous [slots, capacity, KEY_DIM].
        """
        heads = query.shape[1]
        with torch.cuda.device_of(query):  # early releases divide the work for the current device
            if heads not in step.schedules:
                step.schedules[heads] = self._schedule(step.lengths, heads, 1)
            blocks = cached.view(-1, BLOCK, 1, KEY_DIM)
            out, _ = self._attend(
                query.contiguous().unsqueeze(1),
                blocks,
                step.blocks,
                step.lengths,
                VALUE_DIM,
                *step.schedules[heads],
                softmax_scale=scaling,
            )
        return out.squeeze(1)


def flash_mla_for(key: Tensor, capacity: int) -> FlashMla | None:
    """Returns FlashMLA if it can attend to keys like this [n, 1, size] in slots of this capacity."""
    if (reason := FlashMla.misfit(key, capacity)) is not None:
        report_misfit(FlashMla, key.device, reason)
        return None
    return flash_mla_on(key.device)


@cache
def flash_mla_on(device: torch.device) -> FlashMla | None:
    """Returns FlashMLA if it computes on the device what the formula of attention says."""
    return probed(FlashMla, device, compare_attention)


def compare_attention(library: FlashMla, device: torch.device) -> Iterator[Comparison]:
    """Attends with 16 heads to three sequences, within a block, up to its end, and over several."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != _CAPABILITY:
        raise RuntimeError(f"its kernel needs compute capability {'.'.join(map(str, _CAPABILITY))}")
    draw, lengths, capacity, scaling = random_on(device), [4, 63, 150], 3 * BLOCK, 192**-0.5
    query, cached = draw(3, 16, KEY_DIM), draw(4, capacity, KEY_DIM)
    slots = torch.tensor([2, 0, 3], device=device)
    step = LatentStep.of(slots, torch.tensor(lengths, device=device), capacity)
    found = library.attend(query, cached, step, scaling)
    for i, length in enumerate(lengths):
        keys = cached[slots[i], : length + 1].float()
        weights = torch.softmax(query[i].float() @ keys.T * scaling, dim=-1)
        yield Comparison(f"output after {length} tokens", found[i], weights @ keys[:, :VALUE_DIM])
