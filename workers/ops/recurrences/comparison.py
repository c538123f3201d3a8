"""Compares what a library of kernels and our own form compute for a recurrence, when the library is probed."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..attention import Packing, pack_lengths
from ..libraries.probe import Comparison, Library

# Blocks and chunks of kernels end within sequences and at their ends. The probe puts NaN into the one in the middle.
LENGTHS = (300, 1, 64, 131, 17)

Kernels = TypeVar("Kernels", bound=Library, contravariant=True)


class ReplaceableRecurrence(Protocol[Kernels]):
    """A Recurrence that a library may run; without one it runs by our own form."""

    def scan_by(
        self, library: Kernels | None, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def step_by(self, library: Kernels | None, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor: ...


def compare_recurrence(
    op: ReplaceableRecurrence[Kernels],
    library: Kernels,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[Comparison]:
    """Runs a packed row with gradients, and then one more token of each sequence; then both with NaN in the sequence in
    the middle, which must not reach the others.

    Args:
        inputs: for as many tokens as there are in all sequences.
        parameters: those of the op that may be trained.
        lengths: an odd number of them.
    """
    names = ["output", "states", *(f"gradient {i}" for i in range(len(inputs) + len(parameters)))]
    names += ["output of a step", "states after a step"]
    found, wanted = (_results(op, each, inputs, parameters, lengths) for each in (library, None))
    yield from map(Comparison, names, found, wanted)
    middle = len(lengths) // 2
    start = sum(lengths[:middle])
    own = torch.arange(start, start + lengths[middle], device=inputs[0].device)
    spoiled = [x.index_fill(0, own, torch.nan) for x in inputs]
    found, wanted = (_results(op, each, spoiled, (), lengths) for each in (library, None))
    for name, one, other in zip([*names[: 2 + len(inputs)], *names[-2:]], found, wanted, strict=True):
        of_middle = own if len(one) == len(inputs[0]) else own.new_tensor([middle])
        yield Comparison(f"{name} beside NaN", *(x.index_fill(0, of_middle, 0) for x in (one, other)))


def _results(
    op: ReplaceableRecurrence[Kernels],
    library: Kernels | None,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    lengths: Sequence[int],
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, states = op.scan_by(library, leaves, Packing(pack_lengths(list(lengths))))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    gradients = torch.autograd.grad(out, [*leaves, *parameters], weights)
    with torch.no_grad():
        # Slot 0 is unused, and the sequences are in the slots in reverse order: the middle one stays there.
        cache = torch.cat((torch.zeros_like(states[:1]), states))
        slots = torch.arange(len(states), 0, -1, device=cache.device)
        stepped = op.step_by(library, [x[: len(states)] for x in leaves], cache, slots)
    return [out.detach(), states, *gradients, stepped, cache[1:]]
