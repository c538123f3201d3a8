"""Decides whether a library's kernels replace our own form: they must run on the device and compute the same."""

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

# The libraries' own tests allow 1 to 2 % in bfloat16, whose numbers are rounded by up to 0.4 %. What is left out, or
# leaks from another sequence, differs by more.
TOLERANCE = 4e-2

_log = logging.getLogger(__name__)


class Library(Protocol):
    """The kernels of an installed library. NAME: of its distribution. TASK: what it runs, for messages."""

    NAME: ClassVar[str]
    TASK: ClassVar[str]

    def __init__(self) -> None:
        """Imports the library."""
        ...


Kernels = TypeVar("Kernels", bound=Library)


class Comparison(NamedTuple):
    """Holds what a library and our own form compute from the same inputs. what: a name for messages."""

    what: str
    found: Tensor
    wanted: Tensor


def probed(
    library: type[Kernels], device: torch.device, compare: Callable[[Kernels, torch.device], Iterable[Comparison]]
) -> Kernels | None:
    """Returns the library's kernels if all comparisons on the device agree within TOLERANCE.

    Otherwise returns None, and logs the reason.
    """
    try:
        kernels = library()
        with torch.enable_grad():
            reason = _difference(compare(kernels, device))
    except ModuleNotFoundError as error:
        reason = f"it is not installed ({error})"
    except Exception as error:  # anything that a library may raise, with our own form to fall back on
        reason = f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    else:
        if reason is None:
            _log.info("%s runs %s on %s", library.NAME, library.TASK, device)
            return kernels
    _report_unused(library, device, reason)
    return None


@cache
def report_misfit(library: type[Library], device: torch.device, reason: str) -> None:
    """Logs once that inputs do not fit the library."""
    _report_unused(library, device, reason)


def _report_unused(library: type[Library], device: torch.device, reason: str) -> None:
    _log.info("%s does not run %s on %s: %s", library.NAME, library.TASK, device, reason)


def random_on(device: torch.device) -> Callable[..., Tensor]:
    """Returns a function that draws normally distributed numbers of a shape, bfloat16, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def _difference(comparisons: Iterable[Comparison]) -> str | None:
    """Describes the first result that differs by more than TOLERANCE, as a share of its norm."""
    for what, found, wanted in comparisons:
        error = float((found.detach().float() - wanted.detach().float()).norm() / wanted.detach().float().norm())
        if not error < TOLERANCE:
            return f"its {what} differs by {error:.2g} of the norm, more than {TOLERANCE}"
    return None
