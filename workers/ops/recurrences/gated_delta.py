"""The gated delta rule: a state maps keys to values; it decays, and each token corrects the value of its key.

With decay exp(g), a token changes the state S [key_dim, value_dim] to exp(g) S + k (beta (v - exp(g) S' k))', and its
output is S' q: Yang et al., Gated Delta Networks (2024), equation 10, https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..attention import Packing
from ..kernels import kernels_for
from ..libraries.gated_delta import FlashLinearAttention
from ..libraries.probe import Comparison, probed, random_on, report_misfit
from ..recurrence import StateKind
from .chunked_delta import DeltaInputs, normalize, scan_chunks
from .comparison import LENGTHS, compare_recurrence


@dataclass(frozen=True)
class GatedDeltaRule:
    """The gated delta rule of a layer, a Recurrence.

    Its inputs are those of DeltaInputs. The output has v's shape and dtype; the arithmetic is in float32. On a GPU it
    runs as kernels of flash-linear-attention, if that is installed.
    """

    layer: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state(self) -> StateKind:
        return StateKind(self.layer, "delta", (self.value_heads, self.key_dim, self.value_dim), torch.float32)

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.scan_by(_library_for(inputs[0]), inputs, packing, initial)

    def scan_by(
        self,
        library: FlashLinearAttention | None,
        inputs: Sequence[Tensor],
        packing: Packing,
        initial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes `scan` by the library, or by torch's operations if there is none."""
        row = DeltaInputs(*inputs)
        if library is None:
            return scan_chunks(row, packing, initial)
        out, states = library.scan(row, packing.layout(_long_bounds, row.v.device, 0), initial)
        return out.to(row.v.dtype), states

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        kernels = kernels_for(*inputs, states)
        if kernels is not None:
            return kernels.delta_step(DeltaInputs(*inputs), states, slots)
        return self.step_by(_library_for(inputs[0]), inputs, states, slots)

    def step_by(
        self, library: FlashLinearAttention | None, inputs: Sequence[Tensor], states: Tensor, slots: Tensor
    ) -> Tensor:
        """Computes `step` by the library, or by torch's operations if there is none."""
        row, state = DeltaInputs(*inputs), states.index_select(0, slots)
        out, state = _step(row, state) if library is None else library.step(row, state)
        states.index_copy_(0, slots, state)
        return out.to(row.v.dtype)


def _step(row: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output of a token of each sequence, and the states after it; overwrites those before it."""
    repeats = row.v.shape[1] // row.q.shape[1]
    query, _ = normalize(row.q, row.q.shape[-1] ** -0.5)
    key, _ = normalize(row.k)
    similar = torch.linalg.vecdot(query, key).repeat_interleave(repeats, dim=1).unsqueeze(2)
    pairs = torch.stack((key, query), dim=2).repeat_interleave(repeats, dim=1)
    state.mul_(row.g.float().exp()[:, :, None, None])
    known, out = (pairs @ state).unbind(2)
    correction = (row.v - known).mul_(row.beta.unsqueeze(2))
    state.addcmul_(pairs[:, :, 0].unsqueeze(3), correction.unsqueeze(2))
    return out.addcmul(similar, correction), state


def _long_bounds(packing: Packing, device: torch.device, _size: int) -> Tensor:
    """Returns Packing.bounds as int64; one tensor for all layers, since flash-linear-attention caches by identity."""
    return packing.bounds(device).long()


def _library_for(x: Tensor) -> FlashLinearAttention | None:
    return flash_linear_attention_on(x.device) if x.is_cuda else None


@cache
def flash_linear_attention_on(device: torch.device) -> FlashLinearAttention | None:
    """Returns flash-linear-attention if it computes the same on the device as torch's operations."""
    if (reason := FlashLinearAttention.misfit(device)) is not None:
        report_misfit(FlashLinearAttention, device, reason)
        return None
    return probed(FlashLinearAttention, device, compare_gated_delta)


def compare_gated_delta(
    library: FlashLinearAttention, device: torch.device, dim: int = 128, lengths: Sequence[int] = LENGTHS
) -> Iterator[Comparison]:
    """Compares two key heads of this size, each for two value heads."""
    draw, tokens = random_on(device), sum(lengths)
    query, key, value = draw(tokens, 2, dim), draw(tokens, 2, dim), draw(tokens, 4, dim)
    inputs = [query, key, value, -0.2 * draw(tokens, 4).float().abs(), draw(tokens, 4).sigmoid()]
    return compare_recurrence(GatedDeltaRule(0, 4, dim, dim), library, inputs, lengths=lengths)
