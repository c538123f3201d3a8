"""The flags of `trainhouse plan`: options of `serve` as they are declared there, and those that only a plan has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeVar

from ...workers.planner.workload import WORKER_OPTIONS, Workload
from ...workers.protocol.option import Positive, option
from ...workers.protocol.worker_config import MemoryOptions
from ..cli.options import flag, server_flag
from ..config.option import Flags, Option, options_of
from ..config.option_values import ConfigError
from ..config.sections import ModelsSection, RanksSection, SamplingSection, SchedulerSection


@dataclass(frozen=True)
class PlanSection:
    """Options that only a plan has, next to those of a Workload."""

    num_devices: Positive | None = option(None, "number of devices, one for each rank", metavar="N")
    device_name: str | None = option(None, "of the devices, such as H100 (nvidia-smi's)")
    draft: str | None = option(
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

_SECTIONS = (ModelsSection, RanksSection, MemoryOptions, SamplingSection, SchedulerSection, Workload, PlanSection)
_DECLARED = {name: each for section in _SECTIONS for name, each in options_of(section).items()}
_OF_PLAN = ("training", "lora_rank", "adapter_slots", *options_of(PlanSection))
OPTIONS: Mapping[str, Option] = {name: _DECLARED[name] for name in (*_OF_SERVE, *_OF_PLAN, *OF_GROUPS)}

# By what is trained: options that have no effect then, and the things that they configure.
_OF_OTHERS = {
    "lora": (("full_slots", "optimizer_states"), "full models"),
    "full": (("lora_rank", "adapter_slots", "base_quantization"), "adapters"),
}

Section = TypeVar("Section")


@dataclass(frozen=True)
class PlanOptions:
    """The flags of a plan, checked."""

    typed: Flags
    """Those that are given, by option."""
    of_workload: Mapping[str, Any]
    """Those of them that a Workload has, too."""
    models: ModelsSection
    ranks: RanksSection
    memory: MemoryOptions
    own: PlanSection
    train_only: bool = False

    @staticmethod
    def read(typed: Flags, train_only: bool) -> "PlanOptions":
        """Raises ConfigError."""
        options = ((OPTIONS[name], text) for name, text in typed.items())
        values = {each.name: each.checked(each.read(text, each.flag)) for each, text in options}

        def section(kind: type[Section]) -> Section:
            return kind(**{name: values[name] for name in options_of(kind) if name in values})

        training = values.get("training", Workload.training)
        names, things = _OF_OTHERS[training]
        for name in names:
            if name in typed:
                raise ConfigError(
                    f"{OPTIONS[name].flag} configures {things}, which --training {training} has none of: leave it out"
                )
        names = {*WORKER_OPTIONS, *options_of(Workload)} & values.keys()
        of_workload = {name: values[name] for name in names if values[name]}
        models, ranks, memory = section(ModelsSection), section(RanksSection), section(MemoryOptions)
        return PlanOptions(typed, of_workload, models, ranks, memory, section(PlanSection), train_only)

    @property
    def names_groups(self) -> bool:
        return any(name in self.typed for name in OF_GROUPS)


def flags() -> Iterator[Parameter]:
    yield from map(server_flag, OPTIONS.values())
    yield flag("train_only", "--train-only", "sampling happens elsewhere (docs/samplers.md)", kind=bool)
    yield flag("json", "--json", "print one JSON object, with sizes in bytes", kind=bool)
