"""Tensor parallelism of drafts: ranks along tp divide attention heads and the features of the MLP.

Shoeybi et al., Megatron-LM (2019), https://arxiv.org/abs/1909.08053, section 3. All other weights are whole on each
rank. For the output head, each rank contributes the gradients of the draft tokens that it scores.
"""

from collections.abc import Sequence
from dataclasses import replace

from ....schemas.errors import OperationError
from ...parallel.mesh import Mesh
from ...shapes.draft_sizes import DIVIDED_DIMS
from ...shapes.split import Split
from ...state.parameter import DimensionSplit, ModelParameter

# Modules that are whole on each rank, while each rank has only a summand of their gradient.
_SUMMED = ("lm_head", "q_norm", "k_norm")


def shard_parameters(parameters: Sequence[ModelParameter], mesh: Mesh) -> list[ModelParameter]:
    """Returns this rank's parts of the given whole parameters. Raises OperationError if the ranks cannot divide one
    evenly."""
    return [_shard(each, mesh) for each in parameters] if mesh.spec.tp > 1 else list(parameters)


def _shard(parameter: ModelParameter, mesh: Mesh) -> ModelParameter:
    module, team = parameter.key.split(".")[-2], mesh.along("tp")
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
