"""The workload of a rank, as far as it determines memory. Imports no torch."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ..protocol.option import Positive, option
from ..protocol.worker_config import (
    DEFAULT_KV_CACHE_BYTES,
    DEFAULT_MICRO_BATCH_TOKENS,
    Training,
    WorkerConfig,
    WorkerOptions,
)
from ..shapes.layouts.parameters import BYTES_PER_NUMBER


@dataclass(frozen=True)
class Workload:
    """The work of a rank on the base model: the worker's options that determine memory, and the longest sequence."""

    longest: int
    """Tokens of the longest sequence, which runs alone if it exceeds a micro-batch."""
    dtype: str = "bfloat16"
    on_cpu: bool = False
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    head_chunk_tokens: int = WorkerOptions.head_chunk_tokens
    lora_rank: Positive = option(32, "of each adapter")  # the SDK's default
    """All adapters are assumed to adapt all linear layers."""
    adapter_slots: Positive = option(1, "adapters in use at a time")
    full_slots: int = WorkerOptions.full_slots
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    tp_activations: str = WorkerOptions.tp_activations
    zero_stage: str = WorkerOptions.zero_stage
    activations: str = WorkerOptions.activations
    base_quantization: str = WorkerOptions.base_quantization
    optimizer_states: str = WorkerOptions.optimizer_states
    samples: bool = True
    """True if the rank also samples."""
    training: Training = option("lora", "what is trained: adapters, or all weights")
    """The content of slots: adapters, or fully fine-tuned models."""

    @staticmethod
    def of(config: WorkerConfig, longest: int, dtype: str, samples: bool, on_cpu: bool = False) -> "Workload":
        """Returns the load of a worker; `as_served`."""
        options: dict[str, Any] = {name: getattr(config, name) for name in WORKER_OPTIONS}
        options["kv_cache_bytes"] = config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        options["micro_batch_tokens"] = config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
        return Workload(longest=longest, dtype=dtype, on_cpu=on_cpu, samples=samples, **options).as_served

    @property
    def as_served(self) -> "Workload":
        """Returns the load as a worker knows it: with adapters of the usual rank, and one slot without --adapter-slots,
        because a worker adds slots as runs arrive, up to what its device holds."""
        has_default = self.adapter_slots == WorkerOptions.adapter_slots
        slots = Workload.adapter_slots if has_default else self.adapter_slots
        return replace(self, lora_rank=Workload.lora_rank, adapter_slots=slots)

    @property
    def tokens(self) -> int:
        return max(self.micro_batch_tokens, self.longest)

    @property
    def number_bytes(self) -> int:
        return BYTES_PER_NUMBER[self.dtype]

    @property
    def slots_option(self) -> str:
        return "adapter_slots" if self.training == "lora" else "full_slots"

    @property
    def slots_flag(self) -> str:
        return "--" + self.slots_option.replace("_", "-")

    @property
    def slots(self) -> int:
        return getattr(self, self.slots_option)

    def with_slots(self, number: int) -> "Workload":
        return replace(self, **{self.slots_option: number})

    @property
    def effective_lora_rank(self) -> int:
        """Returns the rank of the adapters, 0 if there are none."""
        return self.lora_rank if self.training == "lora" else 0

    def with_max_tokens(self, tokens: int) -> "Workload":
        """Returns the load with at most this many tokens in a micro-batch."""
        return replace(self, longest=min(self.longest, tokens), micro_batch_tokens=min(self.micro_batch_tokens, tokens))


WORKER_OPTIONS = {each.name for each in fields(Workload)} & {each.name for each in fields(WorkerOptions)} - {"dtype"}
"""The worker's options that a load has, too; its dtype is the one that auto has become."""
