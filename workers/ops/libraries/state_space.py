"""Adapts mamba-ssm's kernels of the state-space recurrence."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

# Mamba-2's authors train with chunks of this many tokens.
_CHUNK = 256


class MambaSsm:
    """Runs the recurrence for the inputs of StateSpaceInputs, see ../recurrences/state_space.py."""

    NAME: ClassVar[str] = "mamba-ssm"
    TASK: ClassVar[str] = "the state-space recurrence"

    def __init__(self) -> None:
        from mamba_ssm.ops.triton.selective_state_update import (  # pyright: ignore[reportMissingImports]
            selective_state_update,
        )
        from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
            mamba_chunk_scan_combined,
        )

        self._scan, self._step = mamba_chunk_scan_combined, selective_state_update

    @staticmethod
    def misfit(x: Tensor) -> str | None:
        """Returns why the library should not compute x, if it should not."""
        return None if x.dtype == torch.bfloat16 else f"inputs are {x.dtype}, not bfloat16"

    def scan(self, batch: Sequence[Tensor], a: Tensor, skip: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the output of sequences of equal length, and their states after it, float32; both with gradients.

        The library can also pack sequences into one row (`seq_idx`). But there it multiplies states of the sequence
        before by 0, and 0 * NaN is NaN; sequences of a batch have nothing in common.

        Args:
            batch: x, dt, b and c, each [sequences, tokens, ...].
            a: float32 [heads].
            initial: [sequences, heads, head_dim, state_dim].
        """
        x, dt, b, c = batch
        return self._scan(x, dt, a, b, c, _CHUNK, D=skip, initial_states=initial, return_final_states=True)

    def step(self, row: Sequence[Tensor], a: Tensor, skip: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        """Returns the output of a token of each sequence, and advances the states in their slots.

        Args:
            row: x, dt, b and c, each [n, ...].
            states: float32 [num_slots, heads, head_dim, state_dim].
            slots: int64 [n]; as int32, the kernel's offsets into many large states would overflow.
        """
        x, dt, b, c = row
        _, head_dim, state_dim = states.shape[1:]
        # Views without strides mean one number for a head; only if dt_bias is such a view too, it is read once.
        by_feature = [each.unsqueeze(-1).expand(*each.shape, head_dim) for each in (dt, skip, torch.zeros_like(a))]
        decay = a[:, None, None].expand(-1, head_dim, state_dim)
        return self._step(
            states, x, by_feature[0], decay, b, c, by_feature[1], dt_bias=by_feature[2], state_batch_indices=slots
        )
