"""The workload of a rank, as far as it determines memory. Imports no torch."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ..protocol.worker_config import DEFAULT_KV_CACHE_BYTES, DEFAULT_MICRO_BATCH_TOKENS, Training, WorkerConfig
from ..shapes.layouts.parameters import BYTES_PER_NUMBER


@dataclass(frozen=True)
class Workload:
    """Describes what a rank does with the base model. Fields that are also knobs of the worker have the knob's name.

    dtype: of the base model. on_cpu: whether its ranks are on CPUs.
    longest: tokens of the longest sequence, which runs alone if it exceeds a micro-batch.
    training: what the slots hold, "lora" = adapters, "full" = fully fine-tuned models.
    lora_rank: of all adapters, which are assumed to adapt all linear layers. adapter_slots: adapters in use at a time.
    samples: whether the rank also samples.
    """

    longest: int
    dtype: str = "bfloat16"
    on_cpu: bool = False
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    head_chunk_tokens: int = WorkerConfig.head_chunk_tokens
    lora_rank: int = 32  # the SDK's default
    adapter_slots: int = 1
    full_slots: int = WorkerConfig.full_slots
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    tp_activations: str = WorkerConfig.tp_activations
    zero_stage: str = WorkerConfig.zero_stage
    activations: str = WorkerConfig.activations
    base_quantization: str = WorkerConfig.base_quantization
    optimizer_states: str = WorkerConfig.optimizer_states
    samples: bool = True
    training: Training = "lora"

    @staticmethod
    def of(config: WorkerConfig, longest: int, dtype: str, samples: bool, on_cpu: bool = False) -> "Workload":
        """Returns the load of a worker; `as_served`."""
        shared = {each.name for each in fields(Workload)} & {each.name for each in fields(WorkerConfig)} - {"dtype"}
        knobs: dict[str, Any] = {name: getattr(config, name) for name in shared}
        knobs["kv_cache_bytes"] = config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        knobs["micro_batch_tokens"] = config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
        return Workload(longest=longest, dtype=dtype, on_cpu=on_cpu, samples=samples, **knobs).as_served

    @property
    def as_served(self) -> "Workload":
        """Returns the load as a worker knows it: with adapters of the usual rank, and one slot without --adapter-slots,
        because a worker adds slots as runs arrive, up to what its device holds."""
        has_default = self.adapter_slots == WorkerConfig.adapter_slots
        slots = Workload.adapter_slots if has_default else self.adapter_slots
        return replace(self, lora_rank=Workload.lora_rank, adapter_slots=slots)

    @property
    def tokens(self) -> int:
        """Returns the tokens of the largest micro-batch."""
        return max(self.micro_batch_tokens, self.longest)

    @property
    def number_bytes(self) -> int:
        return BYTES_PER_NUMBER[self.dtype]

    @property
    def slots_knob(self) -> str:
        """Returns the knob that sets how many models are on the device at a time."""
        return "adapter_slots" if self.training == "lora" else "full_slots"

    @property
    def slots_flag(self) -> str:
        return "--" + self.slots_knob.replace("_", "-")

    @property
    def slots(self) -> int:
        return getattr(self, self.slots_knob)

    def with_slots(self, number: int) -> "Workload":
        return replace(self, **{self.slots_knob: number})

    @property
    def effective_lora_rank(self) -> int:
        """Returns the rank of the adapters, 0 if there are none."""
        return self.lora_rank if self.training == "lora" else 0

    def with_max_tokens(self, tokens: int) -> "Workload":
        """Returns the load with at most this many tokens in a micro-batch."""
        return replace(self, longest=min(self.longest, tokens), micro_batch_tokens=min(self.micro_batch_tokens, tokens))
