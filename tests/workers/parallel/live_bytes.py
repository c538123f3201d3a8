"""LiveBytes counts the bytes of live tensors after each operation, and keeps the peak."""

from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside it, not views of others; it may be entered again. Internal memory of kernels is not
    seen.

    peak: the most bytes since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # By address, which a later storage may reuse. Storages from outside count 0 bytes.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._take((args, kwargs), are_new=False)
        results = func(*args, **(kwargs or {}))
        self._take(results, are_new=True)
        self.peak = max(self.peak, self.count())
        return results

    def count(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._seen.values())

    def restart(self) -> None:
        self.peak = self.count()

    def _take(self, values: Any, are_new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor):
                    known = self._seen.get(storage._cdata)
                    if known is None or known[0].expired():
                        self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if are_new else 0


def _storages(tensor: Tensor) -> list[UntypedStorage]:
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return [part.untyped_storage() for part in parts]
