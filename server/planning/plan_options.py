"""The flags of `trainhouse plan`: options of `serve` as they are declared there, and those that only a plan has."""
# ruff: noqa: RUF009  (knob() is a field)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any, TypeVar

from ...workers.planner.workload import Workload
from ...workers.protocol.worker_config import Training
from ..cli.options import knob_option, option
from ..config.knob import POSITIVE, Knob, Section, knob, knobs_of
from ..config.knob_values import ConfigError
from ..config.sections import MemorySection, ModelsSection, RanksSection, SamplingSection, SchedulerSection


@dataclass(frozen=True)
class PlanSection(Section):
    """Options that only a plan has, or that it counts otherwise by default."""

    training: Training = knob(Workload.training, "what is trained: adapters, or all weights")
    lora_rank: int = knob(Workload.lora_rank, "of each adapter", check=POSITIVE)
    adapter_slots: int = knob(Workload.adapter_slots, "adapters in use at a time", check=POSITIVE)
    num_devices: int | None = knob(None, "number of devices, one for each rank", metavar="N", check=POSITIVE)
    device_name: str | None = knob(None, "of the devices, such as H100 (nvidia-smi's)")
    draft: str | None = knob(
        None, "plans draft training: eagle3 or dflash, such as eagle3,ttt_length=4", metavar="ALGORITHM[,FIELD=N...]"
    )


_OF_SERVE = (
    *("base_models", "parallel", "device_link", "shard", "device_memory_bytes", "max_context_length", "dtype"),
    *("micro_batch_tokens", "head_chunk_tokens", "full_slots", "base_quantization", "optimizer_states"),
    *("kv_cache_bytes", "tp_activations", "zero_stage", "activations", "draft_parallel"),
)
OF_GROUPS = (
    *("role_groups", "sampler", "sampler_workers", "sampler_parallel", "sampler_device", "vllm_python", "vllm_url"),
    *("vllm_tp", "vllm_memory_share", "vllm_dtype", "shared_devices", "device", "prefill_chunk_tokens"),
    "host_adapter_bytes",
)
"""The options of `serve` with which several rank groups are planned."""

_SECTIONS = (ModelsSection, RanksSection, MemorySection, SamplingSection, SchedulerSection, PlanSection)
_DECLARED = {name: each for section in _SECTIONS for name, each in knobs_of(section).items()}
OPTIONS: Mapping[str, Knob] = {name: _DECLARED[name] for name in (*_OF_SERVE, *knobs_of(PlanSection), *OF_GROUPS)}

# By what is trained: options that have no effect then, and the things that they configure.
_OF_OTHERS = {
    "lora": (("full_slots", "optimizer_states"), "full models"),
    "full": (("lora_rank", "adapter_slots", "base_quantization"), "adapters"),
}

Flags = Mapping[str, str | Sequence[str]]
OneSection = TypeVar("OneSection", bound=Section)


@dataclass(frozen=True)
class PlanOptions:
    """The flags of a plan, checked.

    typed: those that are given, by option.
    """

    typed: Flags
    models: ModelsSection
    ranks: RanksSection
    memory: MemorySection
    own: PlanSection
    train_only: bool = False

    @staticmethod
    def read(typed: Flags, train_only: bool) -> "PlanOptions":
        """Raises ConfigError."""
        values = {name: OPTIONS[name].kind.read(text, OPTIONS[name].flag) for name, text in typed.items()}

        def section(kind: type[OneSection]) -> OneSection:
            return kind(**{name: values[name] for name in knobs_of(kind) if name in values})

        own = section(PlanSection)
        names, things = _OF_OTHERS[own.training]
        for name in names:
            if name in typed:
                raise ConfigError(
                    f"{OPTIONS[name].flag} configures {things}, which --training {own.training} has none of: leave it "
                    "out"
                )
        return PlanOptions(
            typed, section(ModelsSection), section(RanksSection), section(MemorySection), own, train_only
        )

    @property
    def names_groups(self) -> bool:
        return any(name in self.typed for name in OF_GROUPS)

    @property
    def of_workload(self) -> dict[str, Any]:
        """Returns the given values that a Workload has, too."""
        every = {**vars(self.models), **vars(self.ranks), **vars(self.memory), **vars(self.own)}
        names = {each.name for each in fields(Workload)} & self.typed.keys() - {"dtype"}
        return {name: every[name] for name in names if every[name]}


def flags() -> Iterator[Parameter]:
    yield from map(knob_option, OPTIONS.values())
    yield option("train_only", "--train-only", "sampling happens elsewhere (docs/samplers.md)", kind=bool)
    yield option("json", "--json", "print one JSON object, with sizes in bytes", kind=bool)
