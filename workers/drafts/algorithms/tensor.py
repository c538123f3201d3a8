"""Which of a draft's weights ranks along tp have parts of: attention's heads, and features of the MLP.

Shoeybi et al., Megatron-LM (2019), https://arxiv.org/abs/1909.08053, section 3. All else is whole on each of them; of
the output head each adds the gradients of the guesses that it scores.
"""

from collections.abc import Sequence
from dataclasses import replace

from ....schemas.errors import OperationError
from ...parallel.mesh import Mesh
from ...shapes.split import Split
from ...state.parameter import Cut, Parameter

# The dimension that is shared out, by the module's name.
_DIMS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0) | {"o_proj": 1, "down_proj": 1}

# Whole, of which each rank has a summand of the gradient.
_SUMMED = ("lm_head", "q_norm", "k_norm")


def own_parameters(parameters: Sequence[Parameter], mesh: Mesh) -> list[Parameter]:
    """Of whole ones, what this rank has. Raises OperationError on what the ranks cannot share out."""
    return [_own(each, mesh) for each in parameters] if mesh.spec.tp > 1 else list(parameters)


def _own(parameter: Parameter, mesh: Mesh) -> Parameter:
    module, team = parameter.key.split(".")[-2], mesh.along("tp")
    if module not in _DIMS:
        return replace(parameter, is_repeated=module not in _SUMMED)
    dim = _DIMS[module]
    if parameter.shape[dim] % team.size:
        raise OperationError(
            f"{team.size} ranks of this server have a draft's {module} together, by tp, and {parameter.shape[dim]}"
            " features do not go into as many parts: name another intermediate_size"
        )
    split = Split("tp", team.size, team.index, (parameter.shape[dim],))
    shape = list(parameter.shape)
    shape[dim] = split.own_size
    return replace(parameter, shape=tuple(shape), cuts=(Cut(dim, split, {"tp": team.size}),))
