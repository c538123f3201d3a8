"""The trainable state of a model of a run or sampler, in flat float32 vectors.

Work on the whole state (clipping, AdamW, a snapshot, offloading) is one operation on its vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...schemas.models import TrainingConfig
from ..parallel.mesh import Mesh
from ..shapes.layouts.flops import OwnFlops
from .flat_params import FlatLayout
from .gradients import Gradients
from .moments import MOMENTS, MomentFormat
from .program import Program
from .vectors import MOMENT_VECTORS, Arrange, StateVectors
from .zero import ZeroShards

SEED_MASK = (1 << 64) - 1


class Trainable(ABC):
    """A model's weights, gradients and optimizer state on this rank.

    training, program: which parts of the model are trained, and the kind of model. layout: the places of its matrices
    in the vectors. num_steps: optimizer steps that exp_avg has seen. base_name: the base model's name in files; None
    for the worker's name of it.
    """

    # The name of its kind in accounts of memory.
    kind: str

    training: TrainingConfig
    base_name: str | None = None

    # Models next to each other in a micro-batch run faster if they agree in this: the adapted layers, and the rank.
    batching_key: tuple[tuple[bool, ...], int] = (), 0

    # True if passes use its weights in place of the base's.
    replaces_base = False

    # True if its passes share no micro-batches with those of other models.
    is_exclusive = False

    # The bytes of a token's features that passes store for it.
    feature_bytes = 0

    # The operations of its passes in addition to the base's; None if they are not counted.
    flops: OwnFlops | None = None

    # The mesh of the ranks that have parts of it; None for the base model's.
    mesh: Mesh | None = None

    def __init__(
        self,
        layout: FlatLayout,
        device: torch.device,
        dtype: torch.dtype,
        program: Program,
        arrange: Arrange,
        moments: MomentFormat = MOMENTS["float32"],
        zero: ZeroShards | None = None,
        is_trained: bool = True,
    ) -> None:
        """Creates a model with zero weights on the device; for dtype and arrange see StateVectors.

        Args:
            moments: the storage format of exp_avg and exp_avg_sq.
            zero: shards accumulator, exp_avg and exp_avg_sq over ranks, and the weights if products need a copy of
                them in another dtype; None if each rank keeps all of them.
            is_trained: whether it needs weights in float32. Otherwise they are kept in `dtype` alone.
        """
        self.layout, self.program = layout, program
        self.moments, self.zero = moments, zero
        self._has_gathered = zero is not None and dtype != torch.float32
        if zero is not None and self._has_gathered:
            self.vectors = StateVectors(torch.zeros(zero.size, device=device), dtype, arrange, layout.size)
        else:
            kept = torch.float32 if is_trained else dtype
            self.vectors = StateVectors(torch.zeros(layout.size, device=device, dtype=kept), dtype, arrange)
        self.gradients = Gradients(self.vectors, layout.size, zero)
        self.num_steps = 0
        self._num_changes_when_finite = -1

    @abstractmethod
    def initialize(self) -> None:
        """Draws the weights of a new run from its seed, of which 64 bits count."""

    @property
    def trunk_model(self) -> "Trainable | None":
        """The model whose weights the trunk uses when this one runs; None for the base's own weights."""
        return self

    @property
    def weights(self) -> Tensor:
        """The weights that this rank keeps in float32: all of its layout [P], or its part of them.

        Those of a model that is not trained are in the dtype of products.
        """
        return self.vectors.weights

    def has_finite_weights(self) -> bool:
        """True if no weight is NaN or infinite; the weights are read once after each change.

        Losses would not show it: attention returns finite numbers for scores that are NaN.
        """
        if self._num_changes_when_finite != self.vectors.num_changes:
            gathered = self.vectors.get("gathered")  # the same on all ranks
            low, high = torch.aminmax(self.vectors.weights if gathered is None else gathered.tensor)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                return False
            self._num_changes_when_finite = self.vectors.num_changes
        return True

    @property
    def local_weights(self) -> Tensor:
        """A view of the weights that this rank steps."""
        return self.weights if self.zero is None or self._has_gathered else self.weights[self.zero.own_range]

    def gather_weights(self) -> None:
        """Gathers the weights that the ranks have stepped. All ranks that have parts of them call it together."""
        if self.zero is not None:
            gathered = self.vectors.get("gathered")
            self.zero.all_gather(self.local_weights, self.weights if gathered is None else gathered.tensor)
            increment_version([self.weights])

    def copy_weights_of(self, other: "Trainable") -> None:
        """Copies the weights of a model of equal shape, both on the device."""
        self.weights.copy_(other.weights)
        gathered, of_other = (each.vectors.get("gathered") for each in (self, other))
        if gathered is not None and of_other is not None:
            gathered.tensor.copy_(of_other.tensor)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment of `local_weights`, in the format of `moments`, like exp_avg_sq."""
        return self._moment("exp_avg")

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._moment("exp_avg_sq")

    def tensor(self, key: Hashable) -> Tensor:
        """Returns a float32 view of a matrix of the weights."""
        return self.layout.view(self.weights, key)

    def gradient(self, key: Hashable) -> Tensor:
        """Returns the view that collects the gradient of `tensor` in this thread's lane."""
        return self.layout.view(self.gradients.of_lane().tensor, key)

    def live_vectors(self) -> dict[str, Tensor]:
        """Returns the vectors in memory whose content matters."""
        trained = ("weights", "gathered", *(MOMENT_VECTORS if self.num_steps else ()))
        vectors = self.vectors.in_memory()
        return {name: vectors[name] for name in (*trained, *self.gradients.live_vectors()) if name in vectors}

    def fill(self, name: str, fill: Callable[[Tensor], None]) -> None:
        """Sets weights, exp_avg, exp_avg_sq or accumulator. `fill` writes all of its values to a float32 [P], or to one
        in the dtype of the weights if the model is not trained."""
        if name == "weights":
            vector = self.weights
        else:
            vector = self.gradients.accumulator if name == "accumulator" else self._moment(name)
        if self.zero is None or not self._is_in_parts(name):
            values = self._float32(name, vector)
            fill(values)
        else:
            whole = torch.zeros(self.layout.size)
            fill(whole)
            values = whole[self.zero.own_range].to(vector.device)
            if name == "weights" and (gathered := self.vectors.get("gathered")) is not None:
                gathered.tensor.copy_(whole)
        if name in MOMENT_VECTORS and values is not vector:
            self.moments.store(vector, name, values)
        elif values is not vector:
            vector.copy_(values)

    def in_float32(self, name: str) -> Tensor:
        """Returns one of the live vectors [P], as a copy if it is stored in another format.

        If ranks keep parts of it, they all call it together.
        """
        found = self._float32(name, self.vectors.in_memory()[name])
        return self.zero.whole(found) if self.zero is not None and self._is_in_parts(name) else found

    def clear_optimizer(self) -> None:
        """Resets the optimizer to its state before the first step."""
        self.vectors.clear_moments()
        self.num_steps = 0

    def _is_in_parts(self, name: str) -> bool:
        """True if ranks that shard the vectors keep parts of this one."""
        return self.zero is not None and (name != "weights" or self._has_gathered)

    def _moment(self, name: str) -> Tensor:
        vector = self.vectors.get(name) or self.vectors.set(name, self.moments.zeros(self.local_weights))
        return vector.tensor

    def _float32(self, name: str, vector: Tensor) -> Tensor:
        size = self.layout.size if self.zero is None else self.zero.size
        return self.moments.to_float32(vector, name, size) if name in MOMENT_VECTORS else vector
