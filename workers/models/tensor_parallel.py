"""Tensor parallelism: which parts of a model's weights each rank of a team has, and how it loads them.

The parts are read from the files as such (transformers shards on read), and are plain tensors afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel, core_model_loading
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from ..parallel.mesh import Mesh, Team
from ..parallel.split import Split
from ..shapes.parts import Weight


class ParameterSharding:
    """Records the parts that this rank has of a model's parameters, and loads them.

    splits: by parameter name, dimension -> Split along tp, or along ep for experts. sharded: names of the parameters of
    which each rank keeps only some rows, along fsdp (and sp), and gathers the others for use. biases_of_others: by
    name, biases that another rank along tp adds.
    """

    def __init__(self, mesh: Mesh, weights: Mapping[str, Weight]) -> None:
        """Takes the layers' parameters by their names below the trunk."""
        self._mesh, self._weights = mesh, weights
        self.splits: dict[str, dict[int, Split]] = {}
        self.sharded: list[str] = []
        self.biases_of_others: dict[str, Tensor] = {}
        # Rows that are not contiguous, by the storage of the parameter that has not been read yet.
        self._unread: dict[int, list[slice]] = {}

    @contextmanager
    def loading(self) -> Iterator[dict[str, Any]]:
        """Makes `from_pretrained` with the yielded arguments read only this rank's parts, while inside."""
        if self._mesh.along("fsdp", "ep", "tp").size == 1:
            yield {}
            return
        hooks: Any = PreTrainedModel
        loader: Any = core_model_loading
        own = {
            "prepare_distribute_model": classmethod(lambda _, config, device_map=None: (config, device_map, None)),
            "maybe_distribute_model": classmethod(lambda _, model, *__: self._mark(model)),
        }
        for name, hook in own.items():
            setattr(hooks, name, hook)
        loader.DtensorShardOperation = _reader_class(self._unread)
        try:
            yield {"distributed_config": DistributedConfig()}
        finally:
            loader.DtensorShardOperation = DtensorShardOperation
            for name in own:  # the base class has the originals
                delattr(hooks, name)

    def finish_loading(self, model: nn.Module) -> None:
        """Makes the parts plain parameters after loading, and corrects the sizes of linear layers."""
        _name_trunk(model)
        assert not self._unread, "weights in sections were read as if they had none"
        # A tied parameter stays one parameter in both places.
        plain: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(own := parameter.data, DTensor):
                    one = nn.Parameter(own.to_local(), requires_grad=False)
                    module._parameters[leaf] = plain.setdefault(id(parameter), one)
            if isinstance(module, nn.Linear):
                rows, module.in_features = module.weight.shape
                is_sharded = f"{name}.weight" in self.sharded
                module.out_features = rows * self._mesh.shard_team.size if is_sharded else rows
        names = {name for name, _ in model.named_parameters()}
        self.sharded = [name for name in self.sharded if name in names]
        self._leave_bias_to_first(model)

    def _mark(self, model: PreTrainedModel) -> PreTrainedModel:
        _name_trunk(model)
        prefix = f"{model.base_model_prefix}."
        ends = [id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
        embeddings = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
        for name, parameter in list(model.named_parameters()):
            weight = self._weights.get(name.removeprefix(prefix))
            if weight is not None and weight.placement is not None:
                marked = self._marked(name, parameter, weight)
            elif id(parameter) in (*ends, *embeddings):
                marked = self._marked_rows(
                    name, parameter, self._mesh.along() if id(parameter) in ends else self._mesh.along("tp")
                )
            else:
                continue
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = marked
        return model

    def _marked_rows(self, name: str, parameter: nn.Parameter, team: Team) -> nn.Parameter:
        """Divides an embedding or the output head by rows, along `team` and fsdp as far as these divide evenly."""
        num_rows, sharded = parameter.shape[0], self._mesh.shard_team
        team = team if num_rows % team.size == 0 else self._mesh.along()
        axes, shards = [], []
        if sharded.size > 1 and num_rows % (team.size * sharded.size) == 0:
            self.sharded.append(name)
            axes.append("fsdp")
            shards.append(_StridedShard(0, split_factor=team.size) if team.size > 1 else Shard(0))
        if team.size > 1:
            self.splits[name] = {0: Split("tp", team.size, team.index, (num_rows,))}
            axes.append("tp")
            shards.append(Shard(0))
        if not axes:
            return parameter
        marked = distribute_tensor(parameter.data, self._mesh.torch_mesh(*axes), shards, src_data_rank=None)
        return nn.Parameter(marked, requires_grad=False)

    def _marked(self, name: str, parameter: nn.Parameter, weight: Weight) -> nn.Parameter:
        sharded, placement = self._mesh.shard_team, weight.placement
        assert placement is not None
        is_split = placement.dim is not None
        tensor = self._mesh.tensor_team(placement.unit) if is_split else self._mesh.along()
        experts = self._mesh.along() if placement.is_common else self._mesh.expert_team(placement.unit)
        sections = weight.split_sections if is_split else ()
        axes, shards = [], []
        num_parts = experts.size * (tensor.size if placement.dim == 0 else 1)
        if sharded.size > 1 and placement.is_gathered and parameter.shape[0] % (num_parts * sharded.size) == 0:
            self.sharded.append(name)
            axes.append("fsdp")
            # Splits the rows that this rank has along the other axes.
            shards.append(_StridedShard(0, split_factor=num_parts) if num_parts > 1 else Shard(0))
        if experts.size > 1:
            by_expert = Split("ep", experts.size, experts.index, (parameter.shape[0],))
            self.splits.setdefault(name, {})[0] = by_expert
            axes.append("ep")
            shards.append(Shard(0))
        if tensor.size > 1 and placement.dim is not None:
            dim = placement.dim
            self.splits.setdefault(name, {})[dim] = Split("tp", tensor.size, tensor.index, sections)
            axes.append("tp")
            is_plain = dim == 0 or len(sections) == 1
            shards.append(Shard(dim) if is_plain else _StridedShard(dim, split_factor=len(sections)))
        if not axes:
            return parameter
        marked = distribute_tensor(parameter.data, self._mesh.torch_mesh(*axes), shards, src_data_rank=None)
        if tensor.size > 1 and placement.dim == 0 and len(sections) > 1:
            # torch has no placement for rows from several sections of any size: only the size of this one counts.
            part = sharded if name in self.sharded else self._mesh.along()
            self._unread[_storage(marked)] = self.splits[name][0].slices(part.index, part.size)
        return nn.Parameter(marked, requires_grad=False)

    def _leave_bias_to_first(self, model: nn.Module) -> None:
        """Removes the biases that only the first rank adds.

        Outputs of layers whose inputs are split are summed over the ranks, so their bias must be added once.
        """
        if self._mesh.along("tp").index == 0:
            return
        for name, by_dim in self.splits.items():
            path, _, kind = name.rpartition(".")
            module = model.get_submodule(path)
            if isinstance(module, nn.Linear) and 1 in by_dim:
                self._leave(module, path, "bias")
            elif kind == "down_proj" and any(split.axis == "tp" for split in by_dim.values()):
                self._leave(module, path, "down_proj_bias")

    def _leave(self, module: Any, path: str, kind: str) -> None:
        if (bias := getattr(module, kind, None)) is not None:
            self.biases_of_others[f"{path}.{kind}"] = bias.data
            module.register_parameter(kind, None)


def _name_trunk(model: Any) -> None:
    """Corrects the name of the model without its head, which Llama 4's class has from the whole with images."""
    if not hasattr(model, model.base_model_prefix):
        model.base_model_prefix = "model"


def _reader_class(unread: dict[int, list[slice]]) -> type[DtensorShardOperation]:
    """Returns a reader of parameters that also reads non-contiguous rows."""

    class StridedRowsReader(DtensorShardOperation):
        def __init__(self, param: DTensor) -> None:
            super().__init__(param)
            self._stretches = unread.pop(_storage(param), None)

        def shard_tensor(
            self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
        ) -> Any:
            if self._stretches is None:
                return super().shard_tensor(source, tensor_idx, device, dtype)
            return torch.cat([source[each] for each in self._stretches]).to(device=device, dtype=dtype)

    return StridedRowsReader


def _storage(parameter: DTensor | Tensor) -> int:
    """Returns an id that all views of a parameter share, even before it holds numbers."""
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor.untyped_storage()._cdata
