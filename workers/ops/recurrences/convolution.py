"""Depthwise causal convolution along the tokens of each sequence of a packed row, with the activation after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..attention import Packing
from ..kernels import kernels_for
from ..libraries.convolution import CausalConv1d, numbered
from ..libraries.probe import Comparison, probed, random_on, report_misfit
from ..recurrence import StateKind
from .comparison import LENGTHS, compare_recurrence


@dataclass(frozen=True)
class CausalConvolution:
    """The convolution of a layer, a Recurrence of one input [tokens, channels]; its state are the last inputs.

    Computes in float32. On a GPU it runs as kernels of causal-conv1d, if these are installed and fit.

    weight: [channels, width] or [channels, 1, width]; its last column is for the token itself. bias: [channels]. dtype:
    that of the inputs.
    """

    layer: int
    weight: Tensor
    bias: Tensor | None
    is_silu: bool
    dtype: torch.dtype

    @property
    def state(self) -> StateKind:
        channels, width = len(self.weight), self.weight.shape[-1]
        return StateKind(self.layer, "convolution", (channels, width - 1), self.dtype)

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.scan_by(self._library_for(inputs[0]), inputs, packing, initial)

    def scan_by(
        self,
        library: CausalConv1d | None,
        inputs: Sequence[Tensor],
        packing: Packing,
        initial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes `scan` by the library, or by torch's operations if there is none, or an initial state."""
        (x,) = inputs
        ends = packing.layout(Ends, x.device, self.weight.shape[-1] - 1)
        earlier = None if initial is None else initial.mT
        states = ends.last_inputs(x, earlier).mT
        if library is not None and earlier is None:
            numbers = packing.layout(_numbers, x.device, 0)
            return library.scan(x, self.weight.flatten(1), self.bias, self.is_silu, numbers), states.detach()
        if torch.is_grad_enabled():
            assert earlier is None
            return _Convolve.apply(x, self.weight, self.bias, self, ends), states.detach()  # pyright: ignore[reportReturnType]
        return self.activated(self.convolved(x, ends, earlier)).to(x.dtype), states

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        (x,) = inputs
        kernels = kernels_for(x, states)
        if kernels is not None:
            return kernels.convolve_step(x, *self._wide(), states, slots, self.is_silu)
        return self.step_by(self._library_for(x), inputs, states, slots)

    def step_by(self, library: CausalConv1d | None, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        """Computes `step` by the library, or by torch's operations if there is none."""
        (x,) = inputs
        if library is not None:
            return library.step(x, self.weight.flatten(1), self.bias, self.is_silu, states, slots)
        weight, bias = self._wide()
        window = torch.cat((states.index_select(0, slots), x.unsqueeze(2)), dim=2)
        states.index_copy_(0, slots, window[:, :, 1:])
        out = (window * weight).sum(2)
        return self.activated(out if bias is None else out.add_(bias)).to(x.dtype)

    def _wide(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight [channels, width] and bias in float32."""
        bias = None if self.bias is None else self.bias.detach().float()
        return self.weight.detach().flatten(1).float(), bias

    def _library_for(self, x: Tensor) -> CausalConv1d | None:
        if not x.is_cuda:
            return None
        if (reason := CausalConv1d.misfit(x, self.weight, self.bias)) is not None:
            report_misfit(CausalConv1d, x.device, reason)
            return None
        return causal_conv1d_on(x.device)

    def convolved(self, x: Tensor, ends: "Ends", earlier: Tensor | None) -> Tensor:
        """Returns the convolution before the activation, float32 [tokens, channels]."""
        out = _convolve(x, self.taps(), ends.first, earlier, forward=True)
        return out if self.bias is None else out.add_(self.bias.detach())

    def activated(self, out: Tensor) -> Tensor:
        """Applies the activation; may overwrite its argument."""
        return silu(out, inplace=True) if self.is_silu else out

    def taps(self) -> Tensor:
        """Returns the weight of each distance between tokens, float32 [width, channels]; the first one is for 0."""
        return self.weight.detach().flatten(1).float().t().flip(0)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, convolution: CausalConvolution, ends: "Ends"
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.convolution, ctx.ends = convolution, ends
        return convolution.activated(convolution.convolved(x, ends, None)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), convolution, ends = ctx.saved_tensors, ctx.convolution, ctx.ends
        grad = grads[0].float()
        if convolution.is_silu:
            grad = torch.ops.aten.silu_backward(grad, convolution.convolved(x, ends, None))
        gradient = _convolve(grad, convolution.taps(), ends.last, None, forward=False).to(x.dtype)
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        of_weight = _weight_gradient(grad, x, convolution.weight, ends) if ctx.needs_input_grad[1] else None
        return gradient, of_weight, of_bias, None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, ends: "Ends") -> Tensor:
    """Returns the gradient of the weight, float32, given that of the convolution's output."""
    width, columns = weight.shape[-1], []
    for distance in range(width):
        if distance:
            # The tokens at this distance before them are not of their sequence.
            grad = grad.index_fill(0, ends.at_distance[distance - 1], 0)
        columns.append((grad[distance:] * x[: len(x) - distance]).sum(0))
    return torch.stack(columns[::-1], dim=1).view(weight.shape)


class Ends:
    """The tokens of each sequence of a packed row that are nearer than `reach` to its start, or to its end."""

    def __init__(self, packing: Packing, device: torch.device, reach: int) -> None:
        bounds = packing.bounds(device).long()
        starts, stops, distance = bounds[:-1, None], bounds[1:, None], torch.arange(reach, device=device)
        inside = distance < stops - starts
        self.first = NearTokens(torch.where(inside, starts + distance, starts), inside)
        self.last = NearTokens(torch.where(inside, stops - 1 - distance, starts), inside)
        self._earlier = (stops - starts + distance).clamp_(max=reach - 1).unsqueeze(2)
        self.at_distance = [column[ok] for column, ok in zip(self.first.tokens.t(), inside.t(), strict=True)]
        """The token of each sequence at each distance from its first one, if it has so many; int64."""

    def last_inputs(self, x: Tensor, earlier: Tensor | None) -> Tensor:
        """Returns the last inputs of each sequence, [sequences, reach, channels], given those before the row."""
        inputs, inside = x[self.last.tokens.flip(1)], self.last.inside.flip(1).unsqueeze(2)
        if earlier is None:
            return inputs.masked_fill_(inside.logical_not(), 0)
        return torch.where(inside, inputs, earlier.gather(1, self._earlier.expand(inputs.shape)))


class NearTokens:
    """The tokens near an end of each sequence, from the end inwards.

    tokens: int64 [sequences, reach], any of the sequence's where it has no more. inside: bool [sequences, reach], False
    there.
    """

    def __init__(self, tokens: Tensor, inside: Tensor) -> None:
        self.tokens, self.inside = tokens, inside
        self._rows, self._flat_tokens = inside.flatten().nonzero().squeeze(1), tokens[inside]

    def overwrite(self, out: Tensor, near: Tensor) -> None:
        """Overwrites out [tokens, channels] at these tokens by near [sequences, reach, channels]."""
        out.index_copy_(0, self._flat_tokens, near.flatten(0, 1).index_select(0, self._rows))


def _convolve(x: Tensor, taps: Tensor, end: NearTokens, beyond: Tensor | None, forward: bool) -> Tensor:
    """Returns the sum over distances of the taps [width, channels] times the token at that distance from each token.

    The whole row is convolved at once; then the tokens near the ends of sequences are overwritten, so that nothing of
    another sequence, be it NaN, remains.

    Args:
        x: [tokens, channels].
        beyond: the inputs beyond the end of each sequence, [sequences, width - 1, channels]; None for zeros.
        forward: whether the tokens before each one are meant, else those after it.
    """
    out, reach = x * taps[0], len(taps) - 1
    for distance in range(1, len(taps)):
        here, there = (out[distance:], x[:-distance]) if forward else (out[:-distance], x[distance:])
        here.addcmul_(there, taps[distance])
    near = x[end.tokens].masked_fill_(end.inside.logical_not().unsqueeze(2), 0)
    near = torch.cat((torch.zeros_like(near) if beyond is None else beyond, near), dim=1)
    parts = [near[:, reach - distance : 2 * reach - distance] * tap for distance, tap in enumerate(taps)]
    end.overwrite(out, torch.stack(parts).sum(0))
    return out


def _numbers(packing: Packing, device: torch.device, _size: int) -> Tensor:
    return numbered(packing.lengths, device)


@cache
def causal_conv1d_on(device: torch.device) -> CausalConv1d | None:
    """Returns causal-conv1d if it computes the same on the device as torch's operations."""
    return probed(CausalConv1d, device, compare_convolution)


def compare_convolution(
    library: CausalConv1d, device: torch.device, lengths: Sequence[int] = LENGTHS
) -> Iterator[Comparison]:
    """Compares a convolution of 72 channels, more than the kernel's blocks have, with a bias and an activation."""
    draw, channels = random_on(device), 72
    weight, bias = draw(channels, 4).requires_grad_(), draw(channels).requires_grad_()
    op = CausalConvolution(0, weight, bias, True, torch.bfloat16)
    return compare_recurrence(op, library, [draw(sum(lengths), channels)], [weight, bias], lengths)
