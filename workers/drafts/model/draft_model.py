"""A draft model: its trained weights, its vocabulary and the target whose tokens it predicts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig
from ...models.model import BaseModel
from ...parallel.mesh import Mesh
from ...parallel.split import Split
from ...shapes.draft_sizes import DIVIDED_DIMS
from ...state.flat_params import FlatLayout
from ...state.moments import MomentFormat
from ...state.parameter import DimensionSplit, ModelParameter
from ...state.trainable import SEED_MASK, Trainable
from ...state.zero import BackwardSums, ZeroShards
from ..algorithms.algorithm import DraftNetwork
from ..algorithms.draft_programs import DraftProgram
from ..algorithms.draft_shape import DraftShape
from ..sequences.captured_features import FeatureKind
from ..sequences.features import Options
from ..sequences.target_form import TargetForm, target_form
from .groups import DraftGroups

# Modules that are whole on each rank, while each rank has only a summand of their gradient.
_SUMMED = ("lm_head", "q_norm", "k_norm")


class DraftModel(Trainable):
    """The trainable state of one draft model on this rank.

    vocabulary: int64, ascending: the target's tokens that the draft can propose.
    vocabulary_is_chosen: False while `vocabulary` holds only a placeholder, the lowest ids, with which the draft cannot
    be trained.
    target: the model whose tokens it predicts, None = the bare base model.
    target_version: the version of the target's weights (see version.py).
    has_loaded_weights: True if its weights were loaded from another draft.
    draft_lengths: how many tokens it proposes at a time while sampling.
    """

    kind = "drafts"
    is_exclusive = True

    def __init__(
        self,
        draft: DraftConfig,
        base: BaseModel,
        program: DraftProgram,
        moments: MomentFormat,
        groups: DraftGroups,
        is_trained: bool = True,
    ) -> None:
        """Raises OperationError if the configuration is not possible for this base model.

        Args:
            groups: the ranks that have parts of the draft.
            is_trained: False if it only proposes tokens.
        """
        self._base = base
        self._algorithm = program.algorithm
        self.draft = self.training = program.algorithm.with_defaults(draft, base.config, base.vocab_size)
        self.shape = DraftShape.of(self.draft, base.config, base.vocab_size)
        self.draft_lengths = program.algorithm.draft_lengths(self.shape)
        is_alone = groups.mesh.is_single
        layout = FlatLayout(
            [_own_part(each, groups.mesh) for each in program.algorithm.parameters(self.shape)],
            multiple_of=1 if is_alone else ZeroShards.multiple_of(groups.mesh),
        )
        zero = None if is_alone else ZeroShards(layout, groups.mesh, groups.sums_in_backward)
        super().__init__(layout, base.device, base.dtype, program, partial(_by_name, layout), moments, zero, is_trained)
        self.groups, self.mesh = groups, groups.mesh
        self.vocabulary = torch.arange(self.shape.vocabulary, device=base.device)
        self.vocabulary_is_chosen = self.has_full_vocabulary
        self._form: TargetForm | None = None
        self.target: Trainable | None = None
        self.target_version = ""
        self.has_loaded_weights = False
        self._sums: BackwardSums | None = None

    @property
    def trunk_model(self) -> Trainable | None:
        """Returns the model whose weights the base model uses when it runs for this draft: the target."""
        return self.target

    @property
    def feature_bytes(self) -> int:
        return self.feature_kind.token_bytes

    @property
    def capture_layers(self) -> Sequence[int]:
        assert self.draft.capture_layers is not None
        return self.draft.capture_layers

    @property
    def has_full_vocabulary(self) -> bool:
        return self.shape.vocabulary == self.shape.target_vocabulary

    @property
    def feature_kind(self) -> FeatureKind:
        """Returns the kind of captured features that the draft needs of its current target."""
        layers = tuple(self.capture_layers)
        return FeatureKind(self.target_version, layers, self.target_form, self.shape.hidden, self._base.dtype)

    @property
    def target_form(self) -> TargetForm | None:
        """Returns the form in which the draft reads its target's distribution, None if it does not learn from it."""
        if self.draft.target_repr is None:
            return None
        if self._form is None or self._form.vocabulary is not self.vocabulary:
            shape = self.shape
            self._form = target_form(
                self.draft.target_repr,
                self.draft.target_top_k,
                shape.hidden,
                shape.target_vocabulary,
                self.vocabulary,
                self._base.logit_cap,
            )
        return self._form

    @property
    def needs_vocabulary_to_capture(self) -> bool:
        return self.draft.target_repr == "pruned_logits" and self.draft.target_top_k is None

    def initialize(self) -> None:
        self.fill("weights", self._draw)

    def _draw(self, weights: Tensor) -> None:
        """Draws the weights of a new draft, float32 [P]."""
        generator = torch.Generator().manual_seed((self.draft.seed or 0) & SEED_MASK)
        whole = self.layout.unsharded
        drawn = weights if whole is self.layout else torch.zeros(whole.size)
        with self._base.weights.whole_unembedding():
            self._algorithm.initialize(_by_name(whole, drawn), self._base, self.vocabulary, generator)
        if drawn is not weights:
            self.layout.copy_parts(weights, whole.named_views(drawn))

    def set_vocabulary(self, token_ids: np.ndarray) -> None:
        """Sets the draft's vocabulary and reinitializes its weights.

        Args:
            token_ids: int64, ascending, as many as the draft's vocabulary size.
        Raises:
            OperationError: the number of tokens is wrong, or the draft has already been trained.
        """
        if len(token_ids) != self.shape.vocabulary:
            raise OperationError(
                f"{len(token_ids)} tokens do not fit a draft_vocab_size of {self.shape.vocabulary}: give as many"
            )
        if self.vocabulary_is_chosen and (
            self.num_steps or self.gradients.window.num_operations or self.has_loaded_weights
        ):
            raise OperationError(
                f"the draft was already trained with its vocabulary, for {self.num_steps} steps"
                f"{' and before it was loaded' if self.has_loaded_weights else ''}: build the map before the first"
                " forward_backward, or create a new draft"
            )
        self.vocabulary = torch.from_numpy(token_ids).to(self.vocabulary.device)
        self.vocabulary_is_chosen = True
        self.gradients.clear_window()  # operations that were refused because the vocabulary was not chosen
        self.initialize()

    @property
    def missing_state(self) -> str | None:
        """Returns why the draft cannot be scored yet: its vocabulary was not chosen. None if it was."""
        if self.vocabulary_is_chosen:
            return None
        return (
            f"draft_vocab_size is {self.shape.vocabulary} of the target's {self.shape.target_vocabulary} tokens, and"
            " the draft's vocabulary was not chosen: call build_vocab_map with your corpus first, or create a draft"
            " without draft_vocab_size"
        )

    def lookahead(self, options: Options) -> int:
        return self._algorithm.lookahead(options)

    def inference_config(self) -> Mapping[str, Any]:
        """Returns what inference engines read in the draft's config.json, in addition to the shape of its layers."""
        return self._algorithm.inference_config(self.draft)

    def network(self, trains: bool) -> DraftNetwork:
        """Returns the draft's modules over its current weights.

        Args:
            trains: whether backward passes add to the draft's gradients.
        """
        weights = self.vectors.weight_views()
        if trains and self.zero is not None and self.zero.sums_in_backward:
            self._sums = sums = BackwardSums(self.layout, self.zero, self.gradients.scratch)
            weights = {name: _trainable_leaf(weight) for name, weight in weights.items()}
            for name, leaf in weights.items():
                sums.watch(name, leaf)
        elif trains:
            gradients = self.gradients.of_lane().views
            weights = {name: _trainable_leaf(weight, gradients[name]) for name, weight in weights.items()}
        recomputes, team = self._base.activations != "keep", self.groups.mesh.along("tp")
        return self._algorithm.network(self.shape, weights, self.vocabulary, recomputes, team)

    def sum_collected_gradients(self) -> None:
        """Sums the gradients of the last pass's scoring over ranks, unless that is left to the end of the operation."""
        if self._sums is not None:
            self._sums.sum_collected(self._algorithm.scoring_parameters)

    def end_backward(self) -> None:
        """Sums over ranks the other gradients of the last network's pass; zeros if there was none since the last call.

        All ranks call this equally often.
        """
        if self.zero is not None and self.zero.sums_in_backward:
            sums = self._sums or BackwardSums(self.layout, self.zero, self.gradients.scratch)
            sums.finish()
            self._sums = None


def _by_name(layout: FlatLayout, vector: Tensor) -> Mapping[str, Tensor]:
    return {str(matrix.key): layout.view(vector, matrix.key) for matrix in layout.matrices}


def _trainable_leaf(weight: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Returns the weight as a leaf of autograd. Backward passes add to `gradient`, float32, or to a new tensor."""
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = torch.float32
    leaf.grad = gradient
    return leaf


def _own_part(parameter: ModelParameter, mesh: Mesh) -> ModelParameter:
    """Returns this rank's part of a whole parameter: ranks along tp divide attention heads and the features of the MLP.

    Shoeybi et al., Megatron-LM (2019), https://arxiv.org/abs/1909.08053, section 3. All other weights are whole on each
    rank. For the output head, each rank contributes the gradients of the draft tokens that it scores.
    """
    module, team = parameter.key.split(".")[-2], mesh.along("tp")
    if mesh.spec.tp == 1:
        return parameter
    if module not in DIVIDED_DIMS:
        return replace(parameter, is_replicated_over_tp=module not in _SUMMED)
    dim = DIVIDED_DIMS[module]
    if parameter.shape[dim] % team.size:
        raise OperationError(
            f"tp={team.size} of this server cannot divide a draft's {module} evenly: it has {parameter.shape[dim]}"
            " features; choose an intermediate_size that is a multiple of tp"
        )
    split = Split("tp", team.size, team.index, (parameter.shape[dim],))
    shape = list(parameter.shape)
    shape[dim] = split.own_size
    return replace(parameter, shape=tuple(shape), cuts=(DimensionSplit(dim, split, {"tp": team.size}),))
