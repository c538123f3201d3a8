"""Strategy: what sets one algorithm of drafts apart: its modules, and its way through a micro-batch."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ....schemas.models import DraftConfig
from ...losses.draft_scores import DraftScores, Slopes
from ...models.model import BaseModel
from ...parallel.mesh import ALONE, Team
from ...state.parameter import Parameter
from ..sequences.drafting import Draw, Ends, Reach, Told
from ..sequences.features import Features
from ..sequences.labels import Labels, Options
from ..sequences.stored import TargetRepr
from .room import LogitRoom
from .shape import DraftShape

# By name.
Tensors = Mapping[str, Tensor]


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

    def over(self, features: Features, labels: Labels, options: Options, room: LogitRoom) -> DraftPass:
        """options: the loss's. room: for logits."""
        ...

    def take_in(self, told: Told, ends: Ends) -> None:
        """Into its cache, for what it is to guess later."""
        ...

    def guess(self, told: Told, num: int, ends: Ends, draw: Draw) -> None:
        """Takes it in, and then draws `num` guesses of what comes behind the last of `told.following`."""
        ...


class Strategy(Protocol):
    def reach(self, shape: DraftShape) -> Reach:
        """Of its drafts where they guess samples."""
        ...

    @property
    def target_repr(self) -> TargetRepr | None:
        """How its drafts are told what the target says; None: they do not learn that."""
        ...

    def halo(self, options: Options) -> int:
        """How many tokens behind one its guesses from there look at. options: the loss's."""
        ...

    def resolved(self, config: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> DraftConfig:
        """With all that is left open. Raises OperationError on what makes no such draft."""
        ...

    def published(self, config: DraftConfig) -> Mapping[str, Any]:
        """What engines that sample with such drafts read in their configs, of a resolved one."""
        ...

    def parameters(self, shape: DraftShape) -> Sequence[Parameter]: ...

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        """Those of a new draft. vocabulary: int64, the target's tokens that it can say."""
        ...

    def network(
        self,
        shape: DraftShape,
        parameters: Tensors,
        vocabulary: Tensor,
        recomputes: bool = False,
        team: Team = ALONE,
    ) -> Network:
        """recomputes: whether what a pass can compute again is not kept for its way back. team: the ranks that have
        parts of its layers (see tensor.py), and run the same tokens."""
        ...
