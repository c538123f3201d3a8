"""DraftModel: what a draft has learned, the tokens that it can say, and its target."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.models import DraftConfig
from ..models.model import BaseModel
from ..state.flat_params import Layout
from ..state.moments import Moments
from ..state.trainable import SEED_MASK, Learner
from ..state.zero import Zero
from .algorithms.programs import DraftProgram
from .algorithms.shape import DraftShape
from .algorithms.strategy import Network
from .algorithms.tensor import own_parameters
from .groups import DraftGroups
from .sequences.labels import Options
from .sequences.stored import FeatureKind


class DraftModel(Learner):
    """vocabulary: int64, ascending, the target's tokens that it can say. vocabulary_is_chosen: whether anybody has said
    which; else they are the lowest ids, with which it learns nothing. target: whose words it guesses, None = those
    of the bare base model; and its version. was_loaded: whether it has what another one has learned. reach: where it
    guesses samples."""

    def __init__(
        self, draft: DraftConfig, base: BaseModel, program: DraftProgram, moments: Moments, groups: DraftGroups
    ) -> None:
        """groups: of the ranks that train it. Raises OperationError on what makes no such draft."""
        self._base = base
        self._strategy = program.strategy
        self.draft = self.training = program.strategy.resolved(draft, base.config, base.vocab_size)
        self.shape = DraftShape.of(self.draft, base.config, base.vocab_size)
        self.reach = program.strategy.reach(self.shape)
        is_alone = groups.mesh.is_single
        layout = Layout(
            own_parameters(program.strategy.parameters(self.shape), groups.mesh),
            multiple_of=1 if is_alone else Zero.multiple_of(groups.mesh),
        )
        super().__init__(layout, base.device, base.dtype, program, partial(_by_name, layout))
        self.zero = None if is_alone else Zero(layout, groups.mesh)
        self.moments, self.groups = moments, groups
        self.mesh = groups.mesh
        self.vocabulary = torch.arange(self.shape.vocabulary, device=base.device)
        self.vocabulary_is_chosen = self.says_all
        self.target: Learner | None = None
        self.target_version = ""
        self.was_loaded = False

    @property
    def of_trunk(self) -> Learner | None:
        """As of any learner: whose weights the base model has when it runs for this one."""
        return self.target

    @property
    def capture_layers(self) -> Sequence[int]:
        assert self.draft.capture_layers is not None
        return self.draft.capture_layers

    @property
    def says_all(self) -> bool:
        """Whether it can say all of the target's tokens."""
        return self.shape.vocabulary == self.shape.target_vocabulary

    @property
    def feature_kind(self) -> FeatureKind:
        """What it is to be told of its target, as it is aimed now."""
        layers, target_repr = tuple(self.capture_layers), self._strategy.target_repr
        return FeatureKind(self.target_version, layers, target_repr, self.shape.hidden, self._base.dtype)

    def initialize(self) -> None:
        generator = torch.Generator().manual_seed((self.draft.seed or 0) & SEED_MASK)
        whole = self.layout.whole
        drawn = self.weights if whole is self.layout else torch.zeros(whole.size)
        with self._base.whole_unembedding():
            self._strategy.initialize(_by_name(whole, drawn), self._base, self.vocabulary, generator)
        if drawn is not self.weights:
            self.layout.copy_parts(self.weights, whole.named_views(drawn))

    def say(self, token_ids: np.ndarray) -> None:
        """From now on these tokens, int64 ascending, as many as it can. Raises OperationError once it has learned."""
        if len(token_ids) != self.shape.vocabulary:
            raise OperationError(f"{len(token_ids)} tokens for a draft_vocab_size of {self.shape.vocabulary}")
        if self.vocabulary_is_chosen and (self.num_steps or self.window.num_operations or self.was_loaded):
            raise OperationError(
                f"the draft has learned with its vocabulary, for {self.num_steps} steps"
                f"{' and before it was loaded' if self.was_loaded else ''}: build the map before the first"
                " forward_backward, or create a new draft"
            )
        self.vocabulary = torch.from_numpy(token_ids).to(self.vocabulary.device)
        self.vocabulary_is_chosen = True
        self.clear_window()  # of what was refused for want of it
        self.initialize()

    @property
    def lacking(self) -> str | None:
        """See Learner: somebody has to say which tokens it can say."""
        if self.vocabulary_is_chosen:
            return None
        return (
            f"draft_vocab_size is {self.shape.vocabulary}, the target's vocabulary {self.shape.target_vocabulary}, and"
            " which of it the draft says was not chosen: call build_vocab_map with your corpus first, or create a draft"
            " without draft_vocab_size"
        )

    def halo(self, options: Options) -> int:
        """See Strategy."""
        return self._strategy.halo(options)

    def published(self) -> Mapping[str, Any]:
        """What engines that sample with such a draft read in its config, beside the shape of its layers."""
        return self._strategy.published(self.draft)

    def network(self, trains: bool) -> Network:
        """Of its weights as they are now. trains: whether passes over it add to its gradients."""
        weights = self.weight_views()
        if trains:
            gradients = self.gradient_views()
            weights = {name: _learning(weight, gradients[name]) for name, weight in weights.items()}
        recomputes, team = self._base.activations != "keep", self.groups.mesh.along("tp")
        return self._strategy.network(self.shape, weights, self.vocabulary, recomputes, team)


def _by_name(layout: Layout, vector: Tensor) -> Mapping[str, Tensor]:
    return {str(matrix.key): layout.view(vector, matrix.key) for matrix in layout.matrices}


def _learning(weight: Tensor, gradient: Tensor) -> Tensor:
    """gradient: float32, to which backward passes add."""
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = torch.float32
    leaf.grad = gradient
    return leaf
