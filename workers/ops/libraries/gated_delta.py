"""Adapts flash-linear-attention's gated delta rule."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import ClassVar

import torch
from torch import Tensor


class FlashLinearAttention:
    """Runs the gated delta rule for the inputs of DeltaInputs, see ../recurrences/chunked_delta.py."""

    NAME: ClassVar[str] = "flash-linear-attention"
    TASK: ClassVar[str] = "the gated delta rule"

    def __init__(self) -> None:
        from fla.ops import gated_delta_rule  # pyright: ignore[reportMissingImports]

        self._scan = gated_delta_rule.chunk_gated_delta_rule
        self._step = gated_delta_rule.fused_recurrent_gated_delta_rule

    @staticmethod
    def misfit(device: torch.device) -> str | None:
        """Returns why the library does not compute gradients on the device, which it says after compiling for long."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
            return None
        found = version("triton")
        if not (3, 4) <= tuple(int(part) for part in re.findall("[0-9]+", found)[:3]) < (3, 7, 1):
            return None
        return f"Triton {found} computes wrong gradients on this GPU: install torch with Triton 3.7.1 or later"

    def scan(self, row: Sequence[Tensor], bounds: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes Recurrence.scan.

        Args:
            row: each [tokens, ...].
            bounds: int64 [sequences + 1]; the library caches what it derives from it by its identity.
        """
        out, states = self._scan(
            *(x.unsqueeze(0) for x in row),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )
        return out.squeeze(0), states.detach()

    def step(self, row: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output of a token of each sequence, and the states after it."""
        q, k, v, g, beta = (x.unsqueeze(1) for x in row)
        out, state = self._step(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return out.squeeze(1), state
