"""The layers of one base that adapters target, and the adapters of these layers in its passes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...schemas.adapters.peft import stacked_names
from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..models.layers import GroupedExperts
from ..models.model import BaseModel
from ..ops.linear import to_product_layout
from ..parallel.split import Split
from ..programs.policy import POLICY
from ..shapes.parts import RoutedExperts
from ..state.program import Program
from .adapter import Adapter
from .batch_plan import BatchPlan, LinearSite
from .lora_linear import ActivePlan, LoraLinear, MergedLoraLinear
from .segment import Segment
from .target import DOWN, GATE_UP, Group, Target, group_of

_FLAGS: Mapping[str, Group] = {"train_attn": "attention", "train_mlp": "mlp"}


class LoraLayers:
    """Makes every target in the base's trunk a LoraLinear, builds adapters of them, and applies these in passes."""

    def __init__(self, base: BaseModel, max_rank: int) -> None:
        self._base = base
        self._max_rank = max_rank
        self._active = ActivePlan(base)
        self._trunk_targets = tuple(_wrap_targets(base, self._active))
        frozen = dict(_frozen(base, {target.name for target in self._trunk_targets}))
        self._frozen = tuple(frozen)
        self._frozen_experts = tuple(name for name, are_experts in frozen.items() if are_experts)
        base.finish_linears(MergedLoraLinear, self._active.captured_context)
        self._unembed_target = _unembed_target(base)
        self._aligned = _aligned(self._trunk_targets, base.dtype)

    def build(self, lora: LoraConfig, program: Program = POLICY) -> Adapter:
        """Returns an adapter with zero weights that has no id yet.

        Raises:
            OperationError: the rank is too high, or nothing would be trained.
        """
        self.check_rank(lora)
        if program.head != "logprobs":  # nothing runs through the output head
            lora = lora.model_copy(update={"train_unembed": False})
        targets = self._targets(lora)
        return Adapter(lora, targets, self._base, self._unembed_target.name, program, self.unadapted_layers(targets))

    @property
    def declared_experts(self) -> RoutedExperts | None:
        """See BaseModel.declared_experts."""
        return self._base.loaded.declared_experts

    def check_rank(self, lora: LoraConfig) -> None:
        """Raises OperationError if the rank exceeds max_lora_rank."""
        if lora.rank > self._max_rank:
            raise OperationError(
                f"rank {lora.rank} exceeds max_lora_rank {self._max_rank}: lower the rank or start the server with"
                f" --max-lora-rank {lora.rank}"
            )

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """The layers that an adapter of this base may adapt."""
        return (*self._trunk_targets, self._unembed_target)

    def unadapted_layers(self, targets: Sequence[Target]) -> tuple[str, ...]:
        """Returns the names of the trunk's layers that have matrices and are not among these targets."""
        adapted = {target.name for target in targets}
        return (*(each.name for each in self._trunk_targets if each.name not in adapted), *self._frozen)

    def frozen_experts(self, lora: LoraConfig) -> tuple[str, ...]:
        """Returns the names of experts that train_mlp leaves as they are, because adapters do not support them."""
        return self._frozen_experts if lora.train_mlp else ()

    def check_groups(self, lora: LoraConfig) -> None:
        """Raises OperationError if train_attn or train_mlp would adapt nothing of this base, or if each expert is to
        have its own factors and they cannot be adapted."""
        there = {target.group for target in self._trunk_targets}
        idle = [flag for flag, group in _FLAGS.items() if getattr(lora, flag) and group not in there]
        if idle:
            kinds = sorted({name.rpartition(".")[2] for name in self._frozen})
            raise OperationError(
                f"{' and '.join(f'{flag}=True' for flag in idle)} would adapt nothing of {self._base.config.model_type}"
                f" models such as {self._base.source}: adapters do not support {', '.join(kinds) or 'its layers'};"
                f" create it with {' and '.join(f'{flag}=False' for flag in idle)}, or train all weights"
                ' (training="full")'
            )
        if lora.expert_factors == "each" and (frozen := self.frozen_experts(lora)):
            raise OperationError(
                f"expert_factors 'each' asks for adapters of experts such as {frozen[0]}, which are not supported in"
                f" {self._base.config.model_type} models such as {self._base.source}: leave expert_factors out to train"
                ' the other layers, or train all weights (training="full")'
            )

    def bytes_at_rank(self, rank: int) -> int:
        """Returns the bytes of an adapter of all targets in training, whose experts share factors.

        Its weights, accumulated gradients, the gradients of one operation and two moments are float32; two copies of
        the weights have the base's dtype.
        """
        targets = [target.with_shared_factor() for target in self.all_targets]
        numbers = sum(math.prod(side.shape) for target in targets for side in target.matrices(rank))
        return numbers * (5 * torch.float32.itemsize + 2 * self._base.dtype.itemsize)

    def with_groups_of(self, lora: LoraConfig, names: Collection[str]) -> LoraConfig:
        """Returns `lora` with the flags set that adapt the groups of layers of the targets `names`."""
        groups = {target.group for target in self._trunk_targets if target.name in names}
        adapted = {flag: group in groups for flag, group in _FLAGS.items()}
        return lora.model_copy(update=adapted | {"train_unembed": self._unembed_target.name in names})

    def plan(self, segments: Sequence[Segment], before: BatchPlan | None = None) -> BatchPlan:
        """Returns the plan of these segments.

        Args:
            segments: in order, ending at the row's last token; none for the bare base.
            before: an earlier plan to reuse copies from, see BatchPlan.
        """
        return BatchPlan(segments, self._base.device, self._aligned, before)

    def applied(
        self, segments: Sequence[Segment] | BatchPlan, pass_adapters: Sequence[Adapter] = ()
    ) -> AbstractContextManager[None]:
        """Applies these adapters in forward and backward passes of the trunk, with their present weights.

        A plan serves any number of rows of the same segments, until a weight changes. For `pass_adapters` see
        BatchPlan.
        """
        if isinstance(segments, BatchPlan):
            assert segments.is_current, "an adapter's weights have changed since the plan was made"
            return self._active.activated(segments)
        plan = BatchPlan(segments, self._base.device, self._aligned, pass_adapters=pass_adapters)
        return self._active.activated(plan)

    def _targets(self, lora: LoraConfig) -> list[Target]:
        wanted = {group for flag, group in _FLAGS.items() if getattr(lora, flag)}
        targets = [target for target in self._trunk_targets if target.group in wanted]
        if lora.expert_factors == "shared":
            targets = [target.with_shared_factor() for target in targets]
        if lora.train_unembed:
            targets.append(self._unembed_target)
        if not targets:
            raise OperationError(
                f"train_attn={lora.train_attn}, train_mlp={lora.train_mlp}, train_unembed={lora.train_unembed} selects"
                f" no linear layer of this model: it has {sorted({t.kind for t in self._trunk_targets})}"
                " and the output head"
            )
        return targets


def _wrap_targets(base: BaseModel, active: ActivePlan) -> Iterator[Target]:
    """Replaces the trunk's targets by LoraLinear and yields them in the model's order.

    Experts are not replaced: they add their adapters' terms themselves.
    """
    inside = {id(module) for module in base.trunk.modules()}
    all_experts = base.adaptable_experts()
    for name, module in list(base.model.named_modules()):
        if (experts := all_experts.get(name)) is not None:
            experts.adapt(active, base.loaded.saved_name(name))
            experts.quantize(base.weights.quantize)
            splits = [base.loaded.splits.get(f"{name}.{kind}", {}) for kind in experts.matrices]
            of_experts = _expert_targets(base.loaded.saved_name(name), experts, splits)
            yield from (
                replace(target, is_replicated_over_tp=base.loaded.is_replicated_over_tp(f"{name}.down_proj"))
                for target in of_experts
            )
        parent_name, _, kind = name.rpartition(".")
        # Some routers are of a class of their own that computes more.
        if type(module) is not nn.Linear or id(module) not in inside:
            continue
        targets, declared = list(_linear_targets(base, name, module)), base.loaded.declared_weight(f"{name}.weight")
        if targets or declared is not None:
            # Small ones, which every rank has whole, keep their precision.
            if targets or (declared is not None and declared.placement is not None):
                base.weights.quantize(module, "weight")
            if isinstance(module.weight, Tensor) and not base.weights.is_sharded:
                module.weight.data = to_product_layout(module.weight.data)
            wrapped = LoraLinear(module.weight, module.bias, _site(name, module, targets), active)
            setattr(base.model.get_submodule(parent_name), kind, wrapped)
        yield from targets


def _site(name: str, linear: nn.Linear, targets: Sequence[Target]) -> LinearSite:
    if not targets:
        return LinearSite((name,), (linear.out_features,))
    sizes = tuple(each.local_out_features for each in targets)
    return LinearSite(tuple(each.name for each in targets), sizes, linear.out_features - sum(sizes))


def _linear_targets(base: BaseModel, name: str, linear: nn.Linear) -> Iterator[Target]:
    """Yields the targets of a linear layer: itself, some ranges of its rows, or none."""
    declared = base.loaded.declared_weight(f"{name}.weight")
    names = [name] if declared is None else [f"{name.rpartition('.')[0]}.{each}" for each in declared.adapters]
    if not names or group_of(names[0]) is None:
        return
    is_replicated = base.loaded.is_replicated_over_tp(f"{name}.weight")
    whole = _target(base.loaded.saved_name(name), linear, base.loaded.splits.get(f"{name}.weight", {}))
    if declared is None or len(names) == 1:
        path = base.loaded.name_in_files(name)
        saved_path = None if path == name else base.loaded.saved_name(path)
        yield replace(whole, is_replicated_over_tp=is_replicated, saved_path=saved_path)
        return
    for part, size in zip(names, declared.sections, strict=False):
        split = replace(whole.out_split, sections=(size,)) if whole.out_split else None
        kind = name.rpartition(".")[2]
        own = Target(base.loaded.saved_name(part), whole.in_features, size, None, split, part_of=kind)
        yield replace(own, whole_features=whole.out_features, is_replicated_over_tp=is_replicated)


def _frozen(base: BaseModel, adapted: Set[str]) -> Iterator[tuple[str, bool]]:
    """Yields the names of the trunk's layers with matrices that adapters leave alone, except for the embedding, and
    whether they hold the matrices of several experts."""
    inside = {id(module) for module in base.trunk.modules()}
    experts = {name.rpartition(".")[0] for name in adapted}
    for name, module in base.model.named_modules():
        if id(module) not in inside or isinstance(module, nn.Embedding) or base.loaded.saved_name(name) in experts:
            continue
        if isinstance(module, LoraLinear):
            if adapted.isdisjoint(module.site.names):
                yield base.loaded.saved_name(name), False
            continue
        num_dims = max((parameter.dim() for parameter in module.parameters(recurse=False)), default=0)
        if num_dims > 1:
            yield base.loaded.saved_name(name), num_dims > 2 and not isinstance(module, nn.Conv1d)


def _target(name: str, linear: nn.Linear, splits: Mapping[int, Split]) -> Target:
    """Returns the target for a linear layer, in its full size. `splits` are those of its weight, by dimension."""
    out_split, in_split = splits.get(0), splits.get(1)
    in_features = sum(in_split.sections) if in_split else linear.in_features
    out_features = sum(out_split.sections) if out_split else linear.out_features
    return Target(name, in_features, out_features, in_split, out_split)


def _expert_targets(name: str, experts: GroupedExperts, splits: Sequence[Mapping[int, Split]]) -> Iterator[Target]:
    """Yields the targets of a sparse layer. `splits` are those of its two parameters, by dimension."""
    num, hidden, features = experts.num_experts, experts.hidden_size, experts.num_features
    of_first, of_down = splits
    # The splits of the dimension of features of the experts' stacked matrices.
    packed, inner = (next((each[dim] for dim in each if dim > 0), None) for each in (of_first, of_down))
    by_expert = of_down.get(0)
    outer = replace(packed, sections=(features,)) if packed else None
    *of_features, of_hidden = experts.linears
    kinds = GATE_UP[-len(of_features) :]
    stacked_as = stacked_names(has_gate=len(kinds) == 2)
    for kind, saved_as in zip(kinds, of_features, strict=True):
        yield Target(f"{name}.{kind}", hidden, features, None, outer, num, by_expert, saved_as, stacked_as[kind])
    yield Target(f"{name}.{DOWN}", features, hidden, inner, None, num, by_expert, of_hidden, stacked_as[DOWN])


def _unembed_target(base: BaseModel) -> Target:
    head = base.model.get_output_embeddings()
    name = next(name for name, module in base.model.named_modules() if module is head)
    return Target(base.loaded.saved_name(name), base.unembedding.shape[1], base.vocab_size)


def _aligned(targets: Sequence[Target], dtype: torch.dtype) -> bool:
    """True if a row of every layer's input and output is a multiple of 16 bytes."""
    return all(size * dtype.itemsize % 16 == 0 for t in targets for size in (t.local_in_features, t.local_out_features))
