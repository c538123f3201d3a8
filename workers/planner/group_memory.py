"""Counts what a rank of a group holds in each phase of reinforcement learning. Imports no torch."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ..protocol.parallel_spec import ParallelSpec
from ..resources.machine import gigabytes
from ..shapes.model_shape import ModelShape
from .activations import Activations, forward_activations
from .estimate import MemoryEstimate, estimate
from .trainable_memory import TrainableBytes, adapter_size, bytes_per_number, full_size, value_head_size
from .workload import Workload

Phase = Literal["sampling", "reference scores", "critic pass", "policy pass", "step"]

# In the order of a training loop.
_PASS_OF_ROLE: Mapping[str, Phase] = {
    "reference": "reference scores",
    "critic": "critic pass",
    "policy": "policy pass",
}
PHASES: tuple[Phase, ...] = ("sampling", *_PASS_OF_ROLE.values(), "step")

# Roles whose runs are trained.
_TRAINED = ("policy", "critic")

_SHORTER = "lower --max-context-length and --micro-batch-tokens"
_REMEDIES = {
    "weights": "divide them among more ranks (tp), or pack them (--base-quantization nf4)",
    "kv_cache": "lower --kv-cache-bytes",
    "activations": _SHORTER,
    "buffers": "use tp in place of fsdp",
}


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank by purpose.

    weights: of the base model. models: what runs have learned, adapters or full models, with copies for products.
    gradients: of a window, and of an operation that runs. activations: of a pass. buffers: gathered weights, and
    gradients that are exchanged.
    """

    weights: int = 0
    models: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv_cache: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class GroupMemory:
    """Bytes of a rank of a group, by the time at which it has them.

    waiting: on its device while other groups work. phases: while it works, by phase. moved: what leaves the device if
    the group is offloaded, with the gradients of a window. stays: whether it has its memory while others take turns.
    """

    waiting: RankBytes
    phases: Mapping[Phase, RankBytes]
    moved: RankBytes
    stays: bool = False

    @property
    def peak(self) -> int:
        return max(each.total for each in self.phases.values())

    def during(self, phase: Phase) -> RankBytes:
        return self.phases.get(phase, self.waiting)


def group_memory(
    shape: ModelShape, spec: ParallelSpec, load: Workload, roles: Collection[str], prefill_tokens: int
) -> GroupMemory:
    """Returns the bytes of the rank that needs most. The layout must have passed `check_layout`.

    Args:
        load: its slots are those of each role.
        roles: of the runs that the group trains or scores; none for a group that only samples.
        prefill_tokens: most tokens of prompts that run at a time.
    """
    of_passes = estimate(shape, spec, replace(load, samples=False))
    learned = _Learned(shape, spec, load)
    vectors = learned.of_roles(roles) if roles else learned.of_copies()
    waiting = RankBytes(
        weights=of_passes.base,
        models=vectors.weights + vectors.copies,
        gradients=vectors.gradients // 2,
        optimizer=int(vectors.optimizer),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
    )

    def working(phase: Phase) -> RankBytes:
        if phase == "sampling":
            prefill = replace(load, longest=prefill_tokens, micro_batch_tokens=prefill_tokens)
            buffers = of_passes.dequantized + estimate(shape, spec, load).sampling
            return replace(waiting, activations=forward_activations(shape, spec, prefill).total, buffers=buffers)
        if phase == "step":
            return replace(waiting, buffers=max(of_passes.step, of_passes.saving))
        if phase == "reference scores":
            found = _pass_bytes(forward_activations(shape, spec, load), replace(of_passes, gathered_gradients=0))
        else:
            found = _pass_bytes(of_passes.activations, of_passes, has_logits=phase == "policy pass")
        own = learned.of_roles([role for role in roles if _PASS_OF_ROLE[role] == phase])
        return replace(
            waiting,
            gradients=waiting.gradients + own.gradients // 2,
            activations=found.activations,
            buffers=found.buffers,
        )

    moved = replace(waiting, models=vectors.weights)
    return GroupMemory(waiting, {phase: working(phase) for phase in _phases(roles, load.samples)}, moved)


def reserved_memory(weights: int, reserved: int) -> GroupMemory:
    """Returns the bytes of a device on which another process takes a fixed part: weights, and the cache with all else.

    Raises:
        ValueError: the weights do not fit into it.
    """
    if weights >= reserved:
        raise ValueError(
            f"vLLM has {gigabytes(reserved)} of each device, and its part of the weights is {gigabytes(weights)}: "
            "raise --vllm-tp or --vllm-memory-share, or use larger devices"
        )
    held = RankBytes(weights=weights, kv_cache=reserved - weights)
    return GroupMemory(held, {"sampling": held}, RankBytes(), stays=True)


def _phases(roles: Collection[str], samples: bool) -> Iterator[Phase]:
    if samples:
        yield "sampling"
    for role, phase in _PASS_OF_ROLE.items():
        if role in roles:
            yield phase
    if any(role in roles for role in _TRAINED):
        yield "step"


def _pass_bytes(of_pass: Activations, memory: MemoryEstimate, has_logits: bool = True) -> RankBytes:
    """Returns activations and buffers at the peak of a pass. Critics have no logits, and the values of their heads need
    less than the layers."""
    gathered = memory.gathered + memory.prefetched
    in_layers = RankBytes(
        activations=of_pass.kept + of_pass.working,
        buffers=gathered + memory.dequantized + memory.gathered_gradients,
    )
    if not has_logits:
        return in_layers
    in_head = RankBytes(activations=of_pass.kept + of_pass.head, buffers=gathered + memory.gathered_head)
    return max(in_layers, in_head, key=lambda each: each.total)


class _Learned:
    """Counts the vectors of runs, and of samplers' copies of them."""

    def __init__(self, shape: ModelShape, spec: ParallelSpec, load: Workload) -> None:
        self._load = load
        self._size = full_size(shape, spec) if load.training == "full" else adapter_size(shape, spec, load.lora_rank)
        self._value_head_size = value_head_size(shape)
        self._each = bytes_per_number(load)

    def of_roles(self, roles: Collection[str]) -> TrainableBytes:
        found = [self._of_role(role) for role in roles]
        return TrainableBytes(
            weights=sum(each.weights for each in found),
            gradients=sum(each.gradients for each in found),
            optimizer=sum(each.optimizer for each in found),
            copies=sum(each.copies for each in found),
        )

    def of_copies(self) -> TrainableBytes:
        return self._frozen(self._load.slots * self._size)

    def _of_role(self, role: str) -> TrainableBytes:
        numbers = self._load.slots * (self._size + (self._value_head_size if role == "critic" else 0))
        return self._each.times(numbers) if role in _TRAINED else self._frozen(numbers)

    def _frozen(self, numbers: int) -> TrainableBytes:
        return replace(self._each.times(numbers), gradients=0, optimizer=0)


def largest_term(memory: RankBytes, load: Workload) -> str:
    """Returns a sentence such as "most of it is key/value cache, 8.6 GB: lower --kv-cache-bytes"."""
    name = _largest(memory)
    return f"most of it is {term_words(name)}, {gigabytes(getattr(memory, name))}: {remedy_of(memory, load)}"


def remedy_of(memory: RankBytes, load: Workload) -> str:
    name = _largest(memory)
    if name == "activations" and load.activations == "keep":
        return f"use --activations recompute, or {_SHORTER}"
    return _REMEDIES.get(name) or (f"lower {load.slots_flag}" if load.slots > 1 else "use larger devices")


def term_words(name: str) -> str:
    return name.replace("kv_cache", "key/value cache").replace("_", " ")


def _largest(memory: RankBytes) -> str:
    terms = asdict(memory)
    return max(terms, key=terms.__getitem__)
