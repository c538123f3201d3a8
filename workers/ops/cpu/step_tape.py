"""Repeats what a decode step computes, without the Python between its operations, which takes half of a small step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .library import CompiledLibrary

# The results of a step stay in memory. With more of them than this, operations take most of its time anyway.
_MOST_BYTES = 64 << 20

_NAMESPACES = {"aten", "mkldnn"}
_ALLOCATIONS = {
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default),
    *(torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default),
}
# Their results depend on the numbers in a tensor, or on earlier calls, in more than the numbers of the result.
_UNREPEATABLE = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded),
}
# numpy.asarray calls __array__, inside which calls of Tensor.numpy are not seen.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class StepTape(TorchDispatchMode):
    """Records the operations of a function: torch's on the CPU, and calls of our kernels.

    `repeat` computes the same again, from and to the same tensors: what changes from call to call must be overwritten
    in place. can_repeat: False if a result depends on more than the numbers in tensors, as far as operations show it.
    """

    def __init__(self, library: CompiledLibrary) -> None:
        super().__init__()
        self.can_repeat = True
        self._library = library
        self._calls: list[Callable[[], object]] = []
        self._kept: list[Tensor] = []
        self._result = torch.empty(0)
        self._num_threads = torch.get_num_threads()
        self._num_bytes = 0

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """Calls the function and returns its result."""
        with self._library.recorded_by(self._calls.append), _ReadWatch(self), self:
            self._result = compute()
        self.can_repeat &= self._num_bytes <= _MOST_BYTES
        return self._result

    def repeat(self) -> Tensor:
        """Returns the tensor that `record` returned, overwritten."""
        for call in self._calls:
            call()
        return self._result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        results = list(_tensors(found))
        self._kept += results
        if not func.is_view and not func._schema.is_mutable:
            self._num_bytes += sum(each.nbytes for each in results)
        if func.namespace not in _NAMESPACES or _UNREPEATABLE.intersection(func.tags):
            self.can_repeat = False
        elif not func.is_view and func not in _ALLOCATIONS:
            self._add(func, args, kwargs, results)
        return found

    def _add(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]) -> None:
        if operation._schema.is_mutable:
            call = partial(operation, *args, **kwargs)
        elif (into := _into(operation)) is not None:
            names = [each.name for each in into._schema.arguments if each.is_out]
            call = partial(into, *args, **kwargs, **dict(zip(names, results, strict=True)))
        else:
            call = partial(_overwrite, results, partial(operation, *args, **kwargs))
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            call = partial(_on_threads, num_threads, call)
        self._calls.append(call)


class _ReadWatch(TorchFunctionMode):
    """Sees reads of numbers that are no operations of torch."""

    def __init__(self, tape: StepTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            self._tape.can_repeat = False
        return func(*args, **(kwargs or {}))


def _tensors(found: Any) -> Iterator[Tensor]:
    """Yields the tensors that an operation returned."""
    for each in found if isinstance(found, list | tuple) else [found]:
        if isinstance(each, Tensor):
            yield each


@cache
def _into(operation: Any) -> Any:
    """Returns the variant of an operation that writes its results into given tensors, or None."""
    wanted = [(each.name, str(each.type)) for each in operation._schema.arguments]
    for name in operation.overloadpacket.overloads():
        variant = getattr(operation.overloadpacket, name)
        inputs = [(each.name, str(each.type)) for each in variant._schema.arguments if not each.is_out]
        if inputs == wanted and len(inputs) < len(variant._schema.arguments):
            return variant
    return None


def _overwrite(results: Sequence[Tensor], operation: Callable[[], Any]) -> None:
    for result, found in zip(results, _tensors(operation()), strict=True):
        result.copy_(found)


def _on_threads(num_threads: int, call: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        call()
    finally:
        torch.set_num_threads(before)
