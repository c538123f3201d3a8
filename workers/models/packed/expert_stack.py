"""Finds the weights of each expert in the stacks of MLX's files (`SwitchGLU` of mlx-lm)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from .stored_tensor import Index, StoredTensor, spans

_STACK = "switch_mlp"
# A file of few bytes may say that a stack of empty matrices has any number of them.
_MOST_EXPERTS = 1 << 16
# What transformers' files call the matrices of Mixtral, where mlx-lm calls them as those of other models.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with those of each expert, as transformers' files name them, in the place of stacks.

    Raises:
        ValueError: a stack has no matrices, or too many.
    """
    found: dict[str, StoredTensor] = {}
    for name, each in tensors.items():
        layer, _, matrix = name.partition(f".{_STACK}.")
        if not matrix:
            found[name] = each
            continue
        own, _, leaf = matrix.partition(".")
        if len(shape := each.get_shape()) < 2 or shape[0] > _MOST_EXPERTS:
            raise ValueError(
                f"{name} is of {[*shape]}, but must be a stack of all experts, at most {_MOST_EXPERTS}: use another"
                " release"
            )
        own = _MIXTRAL.get(own, own) if layer.endswith("block_sparse_moe") else own
        for expert in range(shape[0]):
            found[f"{layer}.experts.{expert}.{own}.{leaf}"] = _OfStack(each, expert)
    return found


class _OfStack:
    """Implements StoredTensor for one of the tensors that are stacked in another."""

    def __init__(self, stack: StoredTensor, place: int) -> None:
        self._stack, self._place = stack, place

    def get_shape(self) -> Sequence[int]:
        return self._stack.get_shape()[1:]

    def get_dtype(self) -> str:
        return self._stack.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        own = slice(self._place, self._place + 1)
        return self._stack[(own, *spans(index, self.get_shape()))].squeeze(0)
