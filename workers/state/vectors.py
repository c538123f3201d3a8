"""The flat vectors of a model's state by name, and the memory that they are in."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

# The place of a model's vectors. On a CPU the device and the host are the same memory.
Place = Literal["device", "host", "disk"]

# Makes the views of a vector [P].
Arrange = Callable[[Tensor], Any]

# The optimizer's vectors, and with the weights all trained ones; the other vectors are gradients.
MOMENT_VECTORS = ("exp_avg", "exp_avg_sq")
TRAINED_VECTORS = ("weights", *MOMENT_VECTORS)

# The vectors needed by a forward pass, sampling or a copy; by a backward pass; and by a step, which needs all.
FORWARD_VECTORS: frozenset[str] = frozenset({"weights", "gathered"})
BACKWARD_VECTORS = FORWARD_VECTORS | {"scratch", "accumulator"}
STEP_VECTORS = BACKWARD_VECTORS.union(MOMENT_VECTORS)


class ViewedVector:
    """A vector [P] and its views, which `arrange` makes at first use."""

    def __init__(self, tensor: Tensor, arrange: Arrange) -> None:
        self.tensor = tensor
        self._arrange = arrange

    @cached_property
    def views(self) -> Any:
        return self._arrange(self.tensor)


class StateVectors:
    """Holds `weights`, and from first use `scratch`, `accumulator`, `exp_avg` and `exp_avg_sq`.

    If ranks keep parts of the weights, `gathered` has all of them in the dtype of products. They can be read only on
    the device, and are other tensors after each move (see Residency): hold this object and not its tensors. place:
    where they are.
    """

    def __init__(self, weights: Tensor, dtype: torch.dtype, arrange: Arrange, gathered_size: int | None = None) -> None:
        """Takes the weights on the device, float32, or in `dtype` if they are never trained.

        Args:
            dtype: of products with the weights.
            arrange: makes the views of a vector that the model's products need.
            gathered_size: of `gathered`; None if `weights` has all weights.
        """
        self.place: Place = "device"
        self._dtype, self._arrange = dtype, arrange
        self._on_device = {"weights": ViewedVector(weights, arrange)}
        if gathered_size is not None:
            self.set("gathered", weights.new_zeros(gathered_size, dtype=dtype))
        # While some vectors are on the device, others may have stayed in host memory.
        self._on_host: dict[str, ViewedVector] = {}
        # A copy of the weights in `dtype`, and their version when it was made.
        self._cast: ViewedVector | None = None
        self._cast_version = -1
        self._earlier_changes = 0

    @property
    def weights(self) -> Tensor:
        return (self._on_device.get("weights") or self._unavailable("weights")).tensor

    def get(self, name: str) -> ViewedVector | None:
        """Returns a vector on the device, or None if there is none of this name."""
        if self.place != "device" or name in self._on_host:
            self._unavailable(name)
        return self._on_device.get(name)

    def set(self, name: str, tensor: Tensor) -> ViewedVector:
        self._on_device[name] = vector = self.viewed(tensor)
        return vector

    def viewed(self, tensor: Tensor) -> ViewedVector:
        """Returns a vector [P] with the same views as these have."""
        return ViewedVector(tensor, self._arrange)

    def rename(self, name: str, new_name: str) -> None:
        """Renames a vector on the device; it replaces one that had the new name."""
        self._on_device[new_name] = self._on_device.pop(name)

    def take(self, name: str) -> Tensor:
        """Removes a vector on the device and returns it."""
        return self._on_device.pop(name).tensor

    def discard(self, name: str) -> None:
        """Drops a vector, if there is one."""
        self._on_device.pop(name, None)
        self._on_host.pop(name, None)

    def weight_views(self) -> Any:
        """Returns the weights' views in the dtype of products. If that needs a copy, the first call makes it."""
        if (gathered := self.get("gathered")) is not None:
            return gathered.views
        weights = self._on_device.get("weights") or self._unavailable("weights")
        if self._dtype == weights.tensor.dtype:
            return weights.views
        if self._cast is None:
            self._cast = ViewedVector(weights.tensor.to(self._dtype), self._arrange)
        elif self._cast_version != weights.tensor._version:
            self._cast.tensor.copy_(weights.tensor)
        self._cast_version = weights.tensor._version
        return self._cast.views

    def in_memory(self) -> dict[str, Tensor]:
        """Returns the vectors on the device and in host memory, by name."""
        return {name: vector.tensor for name, vector in (self._on_device | self._on_host).items()}

    @property
    def num_bytes(self) -> int:
        """Bytes on the device and in host memory."""
        cast = self._cast.tensor.nbytes if self._cast else 0
        return cast + sum(vector.nbytes for vector in self.in_memory().values())

    @property
    def num_parked_bytes(self) -> int:
        """Bytes that are in host memory while others are on the device."""
        return sum(vector.tensor.nbytes for vector in self._on_host.values()) if self.place == "device" else 0

    def is_on_device(self, name: str) -> bool:
        return name in self._on_device

    def are_on_host(self, wanted: frozenset[str]) -> bool:
        """True if any of these vectors is in host memory."""
        return not wanted.isdisjoint(self._on_host)

    @property
    def num_changes(self) -> int:
        """Grows with every change of the trained vectors, in whichever place they are."""
        return self._earlier_changes + sum(
            vectors[name].tensor._version
            for vectors in (self._on_device, self._on_host)
            for name in TRAINED_VECTORS
            if name in vectors
        )

    @property
    def version(self) -> tuple[int, int | None]:
        """Differs after every change of the trained vectors, and after every move of the weights."""
        weights = self._on_device.get("weights")
        return self.num_changes, None if weights is None else weights.tensor.data_ptr()

    def clear_moments(self) -> None:
        before = self.num_changes
        for name in MOMENT_VECTORS:
            self.discard(name)
        self._earlier_changes += 1 + before - self.num_changes

    def move(self, place: Place, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor]) -> None:
        """Replaces all vectors by these, and drops views of others."""
        num_changes, before = self.num_changes, self._on_device | self._on_host
        known = {id(vector.tensor): vector for vector in before.values()}
        self._on_device, self._on_host = (
            {name: known.get(id(tensor)) or self.viewed(tensor) for name, tensor in vectors.items()}
            for vectors in (on_device, on_host)
        )
        self.place = place
        self._earlier_changes += num_changes - self.num_changes
        if (self._on_device | self._on_host).get("weights") is not before.get("weights"):
            self._cast = None

    def _unavailable(self, name: str) -> NoReturn:
        place = f"the model is on {self.place}" if self.place != "device" else f"{name} is still on the host"
        raise AssertionError(f"{place}: enter ModelRegistry.resident with {name}")
