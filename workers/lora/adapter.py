"""One LoRA adapter: its targets, its flat vectors, and the views of A and B in them."""

import math
import weakref
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ...schemas.models import LoraConfig
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..shapes.layouts.flops import OwnFlops
from ..shapes.model_shape import ModelShape
from ..state.flat_params import FlatLayout, Matrix
from ..state.program import Program
from ..state.trainable import SEED_MASK, Trainable
from .segmented_matmul import SingleAdapter
from .target import Target


class Adapter(Trainable):
    """A trainable LoRA adapter on a frozen base. The views of its vectors are A and B^T by target.

    tied_embedding: name of the embedding if the output head has the same weights, None if it has its own.
    architecture, head_features: of the base model, see BaseModel and ModelShape; None if it has none.
    text_part_name: see BaseModel.
    stacked_experts: adapted experts whose matrices are in one tensor in files, None if each has its own.
    """

    kind = "adapters"

    def __init__(
        self,
        lora: LoraConfig,
        targets: Sequence[Target],
        base: BaseModel,
        unembed_name: str,
        program: Program = POLICY,
        unadapted_layers: Sequence[str] = (),
    ) -> None:
        """Creates an adapter with zero weights; `initialize` draws them.

        Args:
            unadapted_layers: names of the trunk's other layers that have matrices.
        """
        self.lora = self.training = lora
        self.targets = tuple(targets)
        layout = layout_of(self.targets, lora.rank, program.matrices(base))
        super().__init__(layout, base.device, base.dtype, program, partial(_pairs_of, layout, self.targets))
        self.scale = lora.alpha / lora.rank
        # The flags that decide which matrices it has for the trunk, apart from their rank.
        self.layer_flags = lora.train_attn, lora.train_mlp, self.shares_factors
        self.batching_key = self.layer_flags, lora.rank
        self.unembed_name = unembed_name
        embedding = base.loaded.saved_name(base.embedding_name.removesuffix(".weight"))
        self.tied_embedding = embedding if base.head_name == base.embedding_name else None
        self.not_adapted, self.base_is_sparse = tuple(unadapted_layers), base.is_sparse
        shape = base.shape if isinstance(base.shape, ModelShape) else None
        self.refused_by_peft = None if shape is None else shape.family.refused_by_peft
        self.architecture, self.head_features = base.loaded.architecture, None if shape is None else shape.head_features
        self.text_part_name = base.loaded.text_part_name
        self.stacked_experts = base.loaded.stacked_experts if self.adapts_experts else None
        self.flops = self._own_flops(base, shape)
        self.pairs = {target.name: LoraPair(self, target.name) for target in self.targets}
        self.unembed = self.pairs.get(unembed_name)

    def _own_flops(self, base: BaseModel, shape: ModelShape | None) -> OwnFlops | None:
        if shape is None:
            return None
        num_experts = 1 if shape.experts is None else shape.experts.per_token
        of_targets = {target.name: target.flops(self.lora.rank, num_experts) for target in self.targets}
        head = self.program.flops(base) + of_targets.pop(self.unembed_name, 0.0)
        return OwnFlops(sum(of_targets.values()), head, has_logits=self.program.head == "logprobs")

    @cached_property
    def adapts_experts(self) -> bool:
        return any(target.num_experts is not None for target in self.targets)

    @cached_property
    def shares_factors(self) -> bool:
        """True if the experts of a layer share a matrix of each pair."""
        return any(target.shared is not None for target in self.targets)

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns A and B^T of the target `name`: float32 views of the weights."""
        return self.tensor((name, "lora_A")), self.tensor((name, "lora_B"))

    def initialize(self) -> None:
        """Draws A as PEFT does and leaves B zero.

        The numbers are drawn on the CPU in the targets' order, so any device gives the same ones.
        """
        self.weights.zero_()
        generator = torch.Generator().manual_seed((self.lora.seed or 0) & SEED_MASK)
        for target in self.targets:
            of_a, _ = target.matrices(self.lora.rank)
            drawn = torch.empty(of_a.unsharded().shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            a, _ = self.matrices(target.name)
            a.copy_(of_a.part(drawn))
        self.program.initialize(self, generator)


class LoraPair:
    """Applies one target's matrices: y += scale * (x A^T) B^T."""

    def __init__(self, adapter: Adapter, name: str) -> None:
        self.scale = adapter.scale
        # Weak: the adapter holds its pairs, and a cycle would keep a dropped one in memory until garbage collection.
        self._adapter: Adapter = weakref.proxy(adapter)
        self._name = name

    @property
    def a(self) -> Tensor:
        """A: float32 [rank, in], a view of the adapter's weights."""
        return self._adapter.matrices(self._name)[0]

    @property
    def b(self) -> Tensor:
        """B: float32 [out, rank], a view of the adapter's weights."""
        return self._adapter.matrices(self._name)[1].t()

    def add_terms(self, y: Tensor, x: Tensor) -> None:
        """Adds the terms of x [tokens, in] to y [tokens, out]. x has the base's dtype, as in the other products."""
        a, b_t = self._adapter.vectors.weight_views()[self._name]
        y.addmm_(x @ a.t(), b_t, alpha=self.scale)

    def backward_of_x(self, grad: Tensor, grad_x: Tensor) -> None:
        """Adds to the gradient of x alone, for a pair that is not trained."""
        a, b_t = self._adapter.vectors.weight_views()[self._name]
        grad_x.addmm_((grad @ b_t.t()).mul_(self.scale), a)

    def backward(self, grad: Tensor, x: Tensor, grad_x: Tensor) -> None:
        """Adds to the gradients of A and B, and of x [tokens, in], given that of y, `grad` [tokens, out]."""
        a, b_t = self._adapter.vectors.weight_views()[self._name]
        grad_a, grad_b_t = self._adapter.gradients.of_lane().views[self._name]
        grad_shrunk = (grad @ b_t.t()).mul_(self.scale)
        SingleAdapter.add_outer([grad_a], grad_shrunk, x)
        SingleAdapter.add_outer([grad_b_t], x @ a.t(), grad, self.scale)
        grad_x.addmm_(grad_shrunk, a)


def layout_of(targets: Sequence[Target], rank: int, extra_matrices: Sequence[Matrix] = ()) -> FlatLayout:
    """Returns the layout of an adapter of these targets and of the `extra_matrices` trained with it."""
    return FlatLayout([*(side for target in targets for side in target.matrices(rank)), *extra_matrices])


def pair_of(layout: FlatLayout, vector: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Returns A [rank, in] and B^T [rank, out] in a vector [P]; of experts [experts * rank, ...] unless shared."""
    return layout.view(vector, (target.name, "lora_A")), layout.view(vector, (target.name, "lora_B"))


def _pairs_of(layout: FlatLayout, targets: Sequence[Target], vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {target.name: pair_of(layout, vector, target) for target in targets}
