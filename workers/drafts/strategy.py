"""Strategy: what sets one algorithm of drafts apart: its modules, and its way through a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...schemas.models import DraftConfig
from ..model import BaseModel
from ..parallel.mesh import ALONE, Team
from ..parameter import Parameter
from .features import Features
from .scores import DraftScores, Slopes
from .shape import DraftShape

# By name.
Tensors = Mapping[str, Tensor]
Options = Mapping[str, float | str]


@dataclass(frozen=True, eq=False)
class Labels:
    """Of n tokens: targets int64 [n], the tokens behind them; weights float32 [n], of these. numbers: of the sequences,
    in their operation."""

    targets: Tensor
    weights: Tensor
    numbers: Sequence[int]


class DraftPass(Protocol):
    """A draft on its way through a micro-batch's sequences: some rows after the others, then `close`."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> int:
        """How many are scored at a time."""
        ...

    def scores(self, rows: slice) -> DraftScores:
        """Of rows, in their order."""
        ...

    def weights(self, rows: slice) -> Tensor:
        """[m, depth], of what is guessed."""
        ...

    def places(self, rows: slice) -> Tensor:
        """int64 [m, depth]: behind which of the n tokens what is guessed stands; anything, where there is no guess."""
        ...

    def backward(self, slopes: Slopes) -> None:
        """By the scores that were given last."""
        ...

    def close(self) -> None:
        """Adds what is still missing to the gradients."""
        ...


class Network(Protocol):
    """A draft's modules, of given tensors. What is learned may want gradients."""

    def over(self, features: Features, labels: Labels, options: Options, chunk_rows: int) -> DraftPass:
        """options: the loss's. chunk_rows: rows of logits that may exist at a time."""
        ...


class Strategy(Protocol):
    @property
    def guesses_samples(self) -> bool:
        """Whether samplers know how to let its drafts guess."""
        ...

    def halo(self, options: Options) -> int:
        """How many tokens behind one its guesses from there look at. options: the loss's."""
        ...

    def resolved(self, config: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> DraftConfig:
        """With all that is left open. Raises OperationError on what makes no such draft."""
        ...

    def parameters(self, shape: DraftShape) -> Sequence[Parameter]: ...

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        """Those of a new draft. vocabulary: int64, the target's tokens that it can say."""
        ...

    def network(self, shape: DraftShape, parameters: Tensors, vocabulary: Tensor, team: Team = ALONE) -> Network:
        """team: the ranks that have parts of its layers (see tensor.py), and run the same tokens."""
        ...
