"""The linear layers that adapters adapt, and the two matrices that each adapter has for one."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ...schemas.adapters.peft import PREFIX
from ..parallel.split import Split

Group = Literal["attention", "mlp"]
Side = Literal["lora_A", "lora_B"]

# The linear layers of an expert.
GATE_UP = ("gate_proj", "up_proj")
DOWN = "down_proj"

# Layers are recognised by the last part of their names, and where that is ambiguous, by the part before it too.
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn"})
_MLP = frozenset(
    {
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_fc", "c_proj", "fc1", "fc2", "w1", "w2", "w3"),
        *("dense_h_to_4h", "dense_4h_to_h", "input_linear", "output_linear", "fc1_latent_proj", "fc2_latent_proj"),
    }
)
_ATTENTION_BLOCKS = frozenset({"self_attn", "self_attention", "attention", "attn", "linear_attn", "mamba"})
_WITHIN_ATTENTION = _ATTENTION | {
    *("out_proj", "dense", "c_proj", "gate_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    *("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_qkvz", "x_proj"),
}
# In models whose layers have one part of any kind, all of the same name.
_OF_MAMBA = frozenset({"gate_proj", "x_proj", "out_proj"})


def feature_kinds(experts: str, names: Collection[str]) -> tuple[str, ...]:
    """Returns an expert's linear layers before its activation, if these targets are all of those `experts`."""
    return tuple(kind for kind in GATE_UP if f"{experts}.{kind}" in names)


def group_of(name: str) -> Group | None:
    """Returns the group of layers that a linear layer of this name belongs to, or None if it stays frozen."""
    *_, block, kind = "", *name.split(".")
    if block == "mixer" and kind in _OF_MAMBA:
        return "attention"
    if block in _ATTENTION_BLOCKS:
        return "attention" if kind in _WITHIN_ATTENTION else None
    if kind in _ATTENTION:
        return "attention"
    return "mlp" if kind in _MLP else None


@dataclass(frozen=True)
class Target:
    """A linear layer that an adapter adapts.

    name: its path in the causal LM, such as model.layers.0.mlp.up_proj. in_split, out_split: how its inputs or outputs
    are split over ranks. num_experts: set for the experts of a sparse layer, model.layers.0.mlp.experts.up_proj, each
    of which has its own pair of matrices. expert_split: how experts are split over ranks. saved_as, stacked_as: the
    names of an expert's layer in PEFT's files, None if the same as here, and in files that have one tensor for all
    experts. saved_path: the whole path of any other layer there, None if it is `name`. part_of: the linear layer of
    which it is some of the rows, None if it is a layer itself; whole_features: all outputs of that layer.
    is_replicated_over_tp: whether all ranks along tp have all of it, and run the same tokens.
    shared: the matrix of which the experts of a layer have a single one; None if each expert has both.
    """

    name: str
    in_features: int
    out_features: int
    in_split: Split | None = None
    out_split: Split | None = None
    num_experts: int | None = None
    expert_split: Split | None = None
    saved_as: str | None = None
    stacked_as: str = ""
    saved_path: str | None = None
    part_of: str | None = None
    whole_features: int = 0
    is_replicated_over_tp: bool = False
    shared: Side | None = None

    @property
    def saved_kind(self) -> str:
        return self.saved_as or self.kind

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def group(self) -> Group | None:
        """The group whose flag (train_attn or train_mlp) adapts it; None for the output head and layers of neither."""
        return group_of(self.name)

    @property
    def path(self) -> str:
        """The last two parts of its name, such as mlp.up_proj."""
        return ".".join(self.name.split(".")[-2:])

    @property
    def local_in_features(self) -> int:
        """Input features on this rank."""
        return self.in_split.own_size if self.in_split else self.in_features

    @property
    def local_out_features(self) -> int:
        """Output features on this rank."""
        return self.out_split.own_size if self.out_split else self.out_features

    @property
    def num_local_experts(self) -> int:
        """Pairs of matrices on this rank; one for a plain layer."""
        return self.expert_split.own_size if self.expert_split else self.num_experts or 1

    def with_shared_factor(self) -> "Target":
        """Returns the target with the matrix at the side of the hidden states shared by all experts of the layer.

        A plain layer is returned as it is.
        """
        if self.num_experts is None:
            return self
        return replace(self, shared="lora_B" if self.kind == DOWN else "lora_A")

    def matrices(self, rank: int) -> tuple["LoraMatrix", "LoraMatrix"]:
        """Returns A and B^T of an adapter of this rank."""
        a = LoraMatrix(self, "lora_A", rank, self.in_split, self.local_in_features)
        return a, LoraMatrix(self, "lora_B", rank, self.out_split, self.local_out_features)

    def flops(self, rank: int, experts_per_token: int) -> float:
        """Returns the operations of a forward pass for each token with both matrices: with a shared one of experts
        once, with those of its experts for each of these."""
        of_a, of_b = (
            1 if self.num_experts is None or self.shared == side else experts_per_token for side in get_args(Side)
        )
        return 2.0 * rank * (of_a * self.in_features + of_b * self.out_features)

    def unsharded(self) -> "Target":
        """Returns the unsplit target."""
        return replace(self, in_split=None, out_split=None, expert_split=None, is_replicated_over_tp=False)


def parts_of_layers(targets: Sequence[Target]) -> dict[str, list[Target]]:
    """Returns by path the linear layers of which these targets are some of the rows, with the targets in order."""
    parts: dict[str, list[Target]] = {}
    for target in targets:
        if target.part_of is not None:
            parts.setdefault(f"{target.name.rpartition('.')[0]}.{target.part_of}", []).append(target)
    return parts


@dataclass(frozen=True)
class LoraMatrix:
    """A [rank, in], or B^T [rank, out], of a target; for experts, the matrices of all of them stacked.

    B is stored transposed, which makes its gradient twice as fast. kind: its name in PEFT's files. split: of its
    features over ranks.
    """

    target: Target
    kind: Side
    rank: int
    split: Split | None
    own_features: int

    @property
    def key(self) -> tuple[str, str]:
        return self.target.name, self.kind

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of this rank's part."""
        return self._num_own * self.rank, self.own_features

    @property
    def is_replicated_over_tp(self) -> bool:
        return self.target.is_replicated_over_tp

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks have different parts of it."""
        return tuple(split.axis for split in (self._expert_split, self.split) if split)

    def part(self, unsharded: Tensor) -> Tensor:
        """Returns this rank's part of a whole [experts * rank, features]."""
        if self.split:
            unsharded = self.split.part(unsharded, 1)
        if not self._expert_split:
            return unsharded
        by_expert = unsharded.view(self.target.num_experts or 1, -1, unsharded.shape[1])
        return self._expert_split.part(by_expert, 0).flatten(0, 1)

    def unsharded(self) -> "LoraMatrix":
        """Returns the unsplit side."""
        a, b = self.target.unsharded().matrices(self.rank)
        return a if self.kind == "lora_A" else b

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the parts of all ranks along `axes`, given in rank order."""
        num = self.split.size if self.split else 1
        rows = [parts[i : i + num] for i in range(0, len(parts), num)]
        return torch.cat([self.split.whole(each, 1) if self.split else each[0] for each in rows])

    def named_tensors(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's part as the tensors of files, with B as [out, rank].

        These are each expert's matrices, separately as in PEFT's files. If experts share a matrix, it is one tensor
        [experts, ...] for both sides, with a single expert for the shared matrix.
        """
        by_expert = own.view(self._num_own, -1, own.shape[1])
        each = by_expert if self.kind == "lora_A" else by_expert.transpose(1, 2)
        if self.target.shared is not None:
            yield f"{self._path_of_experts}.{self.target.stacked_as}.{self.kind}.weight", each
        else:
            yield from zip(self._names(), each.unbind(), strict=True)

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor of a file."""
        if saved.dim() == 3 and self._expert_split:
            saved = self._expert_split.part(saved, 0)
        return self.split.part(saved, -1 if self.kind == "lora_A" else -2) if self.split else saved

    @property
    def _is_shared(self) -> bool:
        return self.target.shared == self.kind

    @property
    def _num_own(self) -> int:
        """The matrices on this rank."""
        return 1 if self._is_shared else self.target.num_local_experts

    @property
    def _expert_split(self) -> Split | None:
        return None if self._is_shared else self.target.expert_split

    @property
    def _path(self) -> str:
        return f"{PREFIX}{self.target.saved_path or self.target.name}"

    @property
    def _path_of_experts(self) -> str:
        return self._path.rpartition(".")[0]

    def _names(self) -> Iterator[str]:
        if self.target.num_experts is None:
            yield f"{self._path}.{self.kind}.weight"
            return
        split, num_own = self.target.expert_split, self._num_own
        first = split.index * num_own if split else 0
        for number in range(first, first + num_own):
            yield f"{self._path_of_experts}.{number}.{self.target.saved_kind}.{self.kind}.weight"
