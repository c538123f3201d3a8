"""A worker that watches its passes and decode steps: operations on torch's DTensors, and the tokens that norms take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainhouse.workers.ops.fused import LayerNorm, RmsNorm
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, PartAnswer, Pass, SamplingSlice, SliceResult
from trainhouse.workers.worker.worker import Worker

GUARDED = "trainhouse.tests.workers.parallel.guarded_worker:GuardedWorker"


@dataclass
class Operations:
    """Names of the operations that a rank ran in passes, in decode steps or in steps of optimizers, and of those that
    took a DTensor.

    normed_tokens: the numbers of tokens that the norms of layers took.
    """

    all: set[str] = field(default_factory=set)
    of_dtensors: set[str] = field(default_factory=set)
    normed_tokens: set[int] = field(default_factory=set)


class _Watch(TorchDispatchMode):
    """Sees the operations of this thread, those of the backward pass included, before DTensors handle them."""

    def __init__(self, seen: Operations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._seen.all.add(str(func))
        if any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):
            self._seen.of_dtensors.add(str(func))
        return func(*args, **kwargs)


class GuardedWorker(Worker):
    """Must be alone in its process."""

    def _load(self, mesh: Mesh) -> None:
        super()._load(mesh)
        for norms in (RmsNorm, LayerNorm):
            norms.add = self._watched(norms.add)

    def _watched(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def watched(norm: Any, hidden: Tensor, update: Tensor | None) -> Any:
            if hidden.shape[-1] == self._base.unembedding.shape[1]:  # no norm of latent vectors or heads
                self._operations("pass" if torch.is_grad_enabled() else "decode").normed_tokens.add(len(hidden))
            return add(norm, hidden, update)

        return watched

    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        with _Watch(self._operations("pass")):
            return super().run_pass(parts)

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        with _Watch(self._operations("decode")):
            return super().sample_slice(work)

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        with _Watch(self._operations("step")):
            return super().apply_steps(steps)

    def seen(self, during: str) -> Operations:
        """Returns what ran since the last call during "pass", "decode" or "step"."""
        seen = self._operations(during)
        self._seen.pop(during, None)
        return seen

    def num_dtensors(self) -> int:
        """Returns how many of the model's parameters and buffers are DTensors."""
        model = self._base.model
        return sum(isinstance(each, DTensor) for each in (*model.parameters(), *model.buffers()))

    def use_dtensors(self, during: str) -> None:
        """Doubles hidden states ("forward", "decode") or their gradients ("backward") as DTensors from now on."""
        vars(self._base).pop("hidden_states", None)
        run = self._base.hidden_states
        mesh = self._mesh.torch_mesh(*(axis for axis in ("fsdp", "ep", "tp") if getattr(self._mesh.spec, axis) > 1))

        def doubled(x: Tensor) -> Tensor:
            placements = [Replicate()] * mesh.ndim
            result = DTensor.from_local(x, mesh, placements, run_check=False) * 2
            assert isinstance(result, DTensor)
            return result.to_local()

        def mixed(*arguments: Any, **named: Any) -> Tensor:
            hidden = run(*arguments, **named)
            if during == "backward" and hidden.requires_grad:
                hidden.register_hook(doubled)
            stage = "forward" if torch.is_grad_enabled() else "decode"
            return doubled(hidden) if during == stage else hidden

        self._base.hidden_states = mixed

    def _operations(self, during: str) -> Operations:
        return self._seen.setdefault(during, Operations())

    @property
    def _seen(self) -> dict[str, Operations]:
        return vars(self).setdefault("_seen_operations", {})
