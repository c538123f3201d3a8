"""Watches passes, decode steps and optimizer steps: operations on torch's DTensors, and the tokens that norms take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainhouse.workers.ops.fused import LayerNorm, RmsNorm

from .probe_worker import ProbeWorker


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


# What runs of operations are called, by the verb.
STAGES = {"run_pass": "pass", "sample_slice": "decode", "apply_steps": "step"}


class DTensorGuard:
    """Sees the operations of one rank."""

    def __init__(self, rank: ProbeWorker) -> None:
        self._rank = rank
        self._seen: dict[str, Operations] = {}
        for norms in (RmsNorm, LayerNorm):
            norms.add = self._watched(norms.add)
        for verb, during in STAGES.items():
            rank.surround(verb, partial(self._watch, during))

    def _watch(self, during: str) -> _Watch:
        return _Watch(self._operations(during))

    def _watched(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def watched(norm: Any, hidden: Tensor, update: Tensor | None) -> Any:
            # No norm of latent vectors or heads.
            if hidden.shape[-1] == self._rank.base.unembedding.shape[1]:
                self._operations("pass" if torch.is_grad_enabled() else "decode").normed_tokens.add(len(hidden))
            return add(norm, hidden, update)

        return watched

    def seen(self, during: str) -> Operations:
        """Returns what ran since the last call during "pass", "decode" or "step"."""
        seen = self._operations(during)
        self._seen.pop(during, None)
        return seen

    def num_dtensors(self) -> int:
        """Returns how many of the model's parameters and buffers are DTensors."""
        model = self._rank.base.model
        return sum(isinstance(each, DTensor) for each in (*model.parameters(), *model.buffers()))

    def use_dtensors(self, during: str) -> None:
        """Doubles hidden states ("forward", "decode") or their gradients ("backward") as DTensors from now on."""
        vars(self._rank.base).pop("hidden_states", None)
        run = self._rank.base.hidden_states
        mesh = self._rank.mesh.torch_mesh(
            *(axis for axis in ("fsdp", "ep", "tp") if getattr(self._rank.mesh.spec, axis) > 1)
        )

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

        self._rank.base.hidden_states = mixed

    def _operations(self, during: str) -> Operations:
        return self._seen.setdefault(during, Operations())
