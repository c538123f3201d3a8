"""Tensor parallelism: which of a model's weights the ranks of a team have parts of, and how they come to them.

The parts are read from the files as such (shard on read, by transformers), and are plain tensors afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from .mesh import Mesh
from .split import Split


@dataclass(frozen=True)
class Placement:
    """A dimension of a parameter is shared out along tp. num_sections: equal parts of it, each by itself (see Split).

    of_experts: its rows, one for each expert, are shared out along ep.
    """

    dim: int
    num_sections: int = 1
    of_experts: bool = False


# By name below the trunk. What is not named, every rank has.
TENSOR_PLAN: Mapping[str, Placement] = {
    "layers.*.self_attn.[qkv]_proj.weight": Placement(0),
    "layers.*.self_attn.[qkv]_proj.bias": Placement(0),
    "layers.*.self_attn.o_proj.weight": Placement(1),
    "layers.*.mlp.gate_proj.weight": Placement(0),
    "layers.*.mlp.gate_proj.bias": Placement(0),
    "layers.*.mlp.up_proj.weight": Placement(0),
    "layers.*.mlp.up_proj.bias": Placement(0),
    "layers.*.mlp.down_proj.weight": Placement(1),
    "layers.*.mlp.experts.gate_up_proj": Placement(1, 2, of_experts=True),
    "layers.*.mlp.experts.down_proj": Placement(2, of_experts=True),
}


class Placed:
    """The parts that this rank has of a model's parameters.

    splits: by name of the parameter, dimension -> Split along tp. sharded: names of those of which a rank keeps some
    rows only, along fsdp, and gathers the others for use.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.splits: dict[str, dict[int, Split]] = {}
        self.sharded: list[str] = []

    @contextmanager
    def loading(self) -> Iterator[dict[str, Any]]:
        """Inside, `from_pretrained` with these arguments reads the parts alone."""
        if self._mesh.along("fsdp", "ep", "tp").size == 1:
            yield {}
            return
        hooks: Any = PreTrainedModel
        own = {
            "prepare_distribute_model": classmethod(lambda _, config, device_map=None: (config, device_map, None)),
            "maybe_distribute_model": classmethod(lambda _, model, *__: self._mark(model)),
        }
        for name, hook in own.items():
            setattr(hooks, name, hook)
        try:
            yield {"distributed_config": DistributedConfig()}
        finally:
            for name in own:  # those of its base class are behind them
                delattr(hooks, name)

    def settle(self, model: nn.Module) -> None:
        """After loading: the parts become plain parameters, and linear layers know their own sizes."""
        for name, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(own := parameter.data, DTensor):
                    module._parameters[leaf] = nn.Parameter(own.to_local(), requires_grad=False)
            if isinstance(module, nn.Linear):
                rows, module.in_features = module.weight.shape
                is_sharded = f"{name}.weight" in self.sharded
                module.out_features = rows * self._mesh.along("fsdp").size if is_sharded else rows
        self._leave_bias_to_first(model)

    def _mark(self, model: PreTrainedModel) -> PreTrainedModel:
        """Of parameters that hold nothing yet."""
        prefix = f"{model.base_model_prefix}."
        for name, parameter in list(model.named_parameters()):
            placement = _placement_of(name.removeprefix(prefix))
            if placement is not None:
                parent, _, leaf = name.rpartition(".")
                model.get_submodule(parent)._parameters[leaf] = self._marked(name, parameter, placement)
        return model

    def _marked(self, name: str, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        tensor, sharded = self._mesh.along("tp"), self._mesh.along("fsdp")
        experts = self._mesh.along("ep" if placement.of_experts else "")
        axes, shards = [], []
        num_parts = experts.size * (tensor.size if placement.dim == 0 else 1)
        if sharded.size > 1 and parameter.shape[0] % (num_parts * sharded.size) == 0:
            self.sharded.append(name)
            axes.append("fsdp")
            # Of the rows that this rank has along the other axes.
            shards.append(_StridedShard(0, split_factor=num_parts) if num_parts > 1 else Shard(0))
        if experts.size > 1:
            axes.append("ep")
            shards.append(Shard(0))
        if tensor.size > 1:
            dim, sections = placement.dim, placement.num_sections
            size = parameter.shape[dim]
            self.splits[name] = {dim: Split("tp", tensor.size, tensor.index, (size // sections,) * sections)}
            axes.append("tp")
            shards.append(Shard(dim) if sections == 1 else _StridedShard(dim, split_factor=sections))
        if not axes:
            return parameter
        marked = distribute_tensor(parameter.data, self._mesh.torch_mesh(*axes), shards, src_data_rank=None)
        return nn.Parameter(marked, requires_grad=False)

    def _leave_bias_to_first(self, model: nn.Module) -> None:
        """Outputs of layers whose inputs are shared out are added up over the ranks: their bias must be once in it."""
        for name, by_dim in self.splits.items():
            if 1 in by_dim and self._mesh.along("tp").index > 0:
                module = model.get_submodule(name.rpartition(".")[0])
                if isinstance(module, nn.Linear):
                    module.register_parameter("bias", None)


def _placement_of(name: str) -> Placement | None:
    return next((place for pattern, place in TENSOR_PLAN.items() if fnmatchcase(name, pattern)), None)
