"""Describes what differs between kinds of models. Everything else is the same for every kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..losses import Loss
from ..losses.loss import HeadName
from .flat_params import Matrix

if TYPE_CHECKING:
    from .trainable import Trainable


class Base(Protocol):
    """A base model, as far as programs read it."""

    @property
    def unembedding(self) -> Tensor: ...


def _nothing(base: Base) -> Sequence[Matrix]:
    return ()


def _as_it_is(model: "Trainable", generator: torch.Generator) -> None:
    pass


@dataclass(frozen=True)
class Program:
    """Describes a kind of model.

    head: the head that scores its tokens (see heads). losses: the losses it accepts, by name. trains: whether it has
    gradients and steps. samples: whether it can sample tokens. matrices: what its runs train in addition to LoRA.
    initialize: draws these for a new run, with the seeded generator after LoRA has used it. peft_task, peft_modules:
    PEFT's name of the kind, and the modules saved whole with its adapters.
    """

    role: str
    head: HeadName
    losses: dict[str, Loss]
    trains: bool = True
    samples: bool = True
    matrices: Callable[[Base], Sequence[Matrix]] = _nothing
    initialize: "Callable[[Trainable, torch.Generator], None]" = _as_it_is
    peft_task: str = "CAUSAL_LM"
    peft_modules: tuple[str, ...] = ()

    def flops(self, base: Base) -> float:
        """Returns the operations of a forward pass for each token with the matrices that it adds to a base."""
        return 2.0 * sum(prod(each.shape) for each in self.matrices(base) if len(each.shape) > 1)
