"""The interface of a draft algorithm: its modules, its training pass over a micro-batch, and its drafting."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ....schemas.models import DraftConfig
from ....schemas.training import TargetRepr
from ...models.model import BaseModel
from ...parallel.mesh import ALONE, Team
from ...shapes.logit_budget import LogitBudget
from ...state.parameter import ModelParameter
from ..losses.draft_scores import DraftGradients, DraftScores
from ..sequences.drafting import DraftLengths, Draw, TargetEnds, TargetStates
from ..sequences.features import DraftInputs, Labels, Options
from .draft_shape import DraftShape

# Weights by name.
Tensors = Mapping[str, Tensor]


def chunks(num: int, size: int) -> Iterator[slice]:
    """Divides `num` rows into slices of `size`; the last may be shorter."""
    return (slice(i, min(i + size, num)) for i in range(0, num, size))


class DraftPass(Protocol):
    """A draft's training pass over a micro-batch. Rows are scored and differentiated in chunks; `close` ends it."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> int:
        """Returns how many rows to score at a time."""
        ...

    def scores(self, rows: slice) -> DraftScores: ...

    def weights(self, rows: slice) -> Tensor:
        """Returns the weights of the predicted tokens, [m, depth]."""
        ...

    def label_indices(self, rows: slice) -> Tensor:
        """Returns the index of each predicted token's label, int64 [m, depth]; arbitrary where none is predicted."""
        ...

    def backward(self, gradients: DraftGradients) -> None:
        """Differentiates the scores that were returned last."""
        ...

    def close(self) -> None:
        """Propagates what was collected to the gradients of the weights."""
        ...


class DraftNetwork(Protocol):
    """The modules of a draft over given tensors, which may require gradients."""

    def training_pass(self, inputs: DraftInputs, labels: Labels, options: Options, budget: LogitBudget) -> DraftPass:
        """Starts a training pass. `options` are the loss's, `budget` limits the logits of a chunk."""
        ...

    def extend_cache(self, observed: TargetStates, ends: TargetEnds) -> None:
        """Adds the observed tokens to the draft's KV cache, for later drafting."""
        ...

    def propose(self, observed: TargetStates, num_draft_tokens: int, ends: TargetEnds, draw: Draw) -> None:
        """Adds the observed tokens to the KV cache, then drafts tokens after the last of `observed.next_tokens`."""
        ...


class DraftAlgorithm(Protocol):
    default_target_repr: TargetRepr | None
    """The form in which drafts read the target's distribution unless their configuration names another; None if they do
    not read it."""
    scoring_parameters: Collection[str]
    """The weights whose gradients a pass computes while it scores, without autograd."""

    def draft_lengths(self, shape: DraftShape) -> DraftLengths:
        """Returns how many tokens its drafts propose at a time while sampling."""
        ...

    def lookahead(self, options: Options) -> int:
        """Returns how many tokens after a token the predictions from it read. `options` are the loss's."""
        ...

    def with_defaults(self, config: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> DraftConfig:
        """Fills in all defaults. Raises OperationError if the configuration is not possible for this target."""
        ...

    def inference_config(self, config: DraftConfig) -> Mapping[str, Any]:
        """Returns what inference engines read in the config.json of such a draft, given a resolved configuration."""
        ...

    def parameters(self, shape: DraftShape) -> Sequence[ModelParameter]: ...

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        """Initializes the weights of a new draft. `vocabulary` has the draft's tokens, int64."""
        ...

    def network(
        self,
        shape: DraftShape,
        parameters: Tensors,
        vocabulary: Tensor,
        recomputes: bool = False,
        team: Team = ALONE,
    ) -> DraftNetwork:
        """Returns a draft's modules.

        Args:
            recomputes: whether activations are recomputed in the backward pass instead of kept.
            team: the ranks that have parts of its layers and run the same tokens.
        """
        ...
