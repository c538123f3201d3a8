"""Program: what sets a kind of model apart. All else is done alike for every kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..losses import Loss
from ..losses.loss import Scores
from .flat_params import Matrix

if TYPE_CHECKING:
    from .trainable import Learner


class Base(Protocol):
    """A base model, as far as programs read it."""

    @property
    def unembedding(self) -> Tensor: ...


def _nothing(base: Base) -> Sequence[Matrix]:
    return ()


def _as_it_is(model: "Learner", generator: torch.Generator) -> None:
    pass


@dataclass(frozen=True)
class Program:
    """A kind of model.

    scores: what its head gives for each token (see heads). losses: by name, those that it takes. trains: whether there
    are gradients and steps. samples: whether tokens can be drawn by it. matrices: what its runs learn beside LoRA.
    initialize: these, of a new run; the generator is the seeded one, behind the draws of LoRA. peft_task, peft_modules:
    what PEFT calls the kind, and the modules that are saved whole beside its adapters.
    """

    role: str
    scores: Scores
    losses: dict[str, Loss]
    trains: bool = True
    samples: bool = True
    matrices: Callable[[Base], Sequence[Matrix]] = _nothing
    initialize: "Callable[[Learner, torch.Generator], None]" = _as_it_is
    peft_task: str = "CAUSAL_LM"
    peft_modules: tuple[str, ...] = ()
