"""LiveBytes: how many bytes of tensors are alive, counted at each operation, and the most there were."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Of tensors made inside, not of views of others. peak: the most. What kernels take for themselves is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # By address, which a later storage may have again: bytes, 0 of what was there before.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._take((args, kwargs), are_new=False)
        results = func(*args, **(kwargs or {}))
        self._take(results, are_new=True)
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._seen.values()))
        return results

    def _take(self, values: Any, are_new: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                known = self._seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if are_new else 0
