"""The knobs of a server process in sections, checked against each other, and the configs derived from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from ...schemas.adapters.model_files import is_loopback
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import DispatchConfig, SamplingConfig, ServedModel, VllmConfig, WorkerConfig
from ...workers.shapes.styles import replicated_units
from ..files.storage_config import CheckpointStorageConfig
from ..store import StoreConfig
from .checks import (
    check_kept_workers,
    check_limits,
    check_models,
    check_network,
    check_ranks,
    check_role_groups,
    check_sampling,
    check_storage,
)
from .knob import Knob, Section, knobs_of
from .knob_values import is_url
from .sections import (
    CheckpointsSection,
    FeaturesSection,
    JournalSection,
    LimitsSection,
    MemorySection,
    ModelsSection,
    NetworkSection,
    ProcessSection,
    RanksSection,
    SamplingSection,
    SchedulerSection,
    SdkSection,
    SessionsSection,
    StoreSection,
)


@dataclass(frozen=True)
class ServerConfig:
    """All knobs of a server process, in sections; `trainhouse serve --help-all` lists them.

    Flags, environment variables and the file name a knob without its section: see `of`.
    """

    models: ModelsSection = field(default_factory=ModelsSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    store: StoreSection = field(default_factory=StoreSection)
    ranks: RanksSection = field(default_factory=RanksSection)
    memory: MemorySection = field(default_factory=MemorySection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    sessions: SessionsSection = field(default_factory=SessionsSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    journal: JournalSection = field(default_factory=JournalSection)
    checkpoint_storage: CheckpointsSection = field(default_factory=CheckpointsSection)
    sdk: SdkSection = field(default_factory=SdkSection)
    process: ProcessSection = field(default_factory=ProcessSection)

    def __post_init__(self) -> None:
        """Checks the values against each other; each section has checked its own. Raises ConfigError."""
        check_network(self.network, self.store)
        check_limits(self.limits)
        check_models(self.models, self.ranks)
        check_kept_workers(self.ranks, self.scheduler)
        check_role_groups(self.models, self.ranks)
        check_sampling(self.models, self.sampling)
        check_ranks(self.ranks)
        check_storage(self.checkpoint_storage)

    @classmethod
    def of(cls, **knobs: Any) -> Self:
        """Returns the config with these knobs, named without their sections. Raises ConfigError."""
        sections: dict[str, Any] = {name: SECTIONS[name](**own) for name, own in _by_section(knobs).items()}
        return cls(**sections)

    def with_knobs(self, **knobs: Any) -> Self:
        """Returns a copy with other values of these knobs. Raises ConfigError."""
        changed = {name: replace(getattr(self, name), **own) for name, own in _by_section(knobs).items()}
        return replace(self, **changed)

    def value(self, knob: str) -> Any:
        return getattr(getattr(self, SECTION_OF[knob]), knob)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the server. A host name other than localhost counts as reachable."""
        return is_loopback(self.network.host)

    @property
    def shares_full_weights(self) -> bool:
        """True if samplers of a live full model read its training weights, which needs them in the same workers."""
        sampling = self.sampling
        return self.models.full_sampling == "inflight" and sampling.sampler == "native" and not sampling.sampler_workers

    def worker_config(self, model: ServedModel) -> WorkerConfig:
        devices, base_models = self.ranks.device.split(","), self.models.base_models
        # On another machine of a Ray cluster our directories may not exist.
        pages = None if self.ranks.pool == "ray" else str((self.store.state_dir / "pages").absolute())
        cache = self.models.model_cache
        derived = {
            "parallel": replace(self.ranks.parallel or SINGLE, replicated=replicated_units(self.ranks.shard)),
            "device": devices[base_models.index(model) if len(devices) > 1 else 0],
            "page_directory": pages,
            "model_cache": None if cache is None else str(cache.absolute()),
            "shared_directories": self._shared_directories,
        }
        return WorkerConfig(model=model, **(self._shared(WorkerConfig) | derived))

    @property
    def _shared_directories(self) -> tuple[str, ...]:
        if self.ranks.pool != "ray":
            return ()
        place = self.checkpoint_storage.checkpoints
        checkpoints = () if place is None or is_url(place) else (Path(place),)
        return tuple(str(each.expanduser().absolute()) for each in (self.store.state_dir, *checkpoints))

    def store_config(self) -> StoreConfig:
        return StoreConfig(**self._shared(StoreConfig))

    def storage_config(self) -> CheckpointStorageConfig:
        return CheckpointStorageConfig(**self._shared(CheckpointStorageConfig))

    def dispatch_config(self) -> DispatchConfig:
        derived = {
            "models": tuple(self.worker_config(model) for model in self.models.base_models),
            "tenant_weights": {tenant.name: tenant.weight for tenant in self.scheduler.tenant_weights},
            "sampling": self._sampling_config(),
        }
        return DispatchConfig(**(self._shared(DispatchConfig) | derived))

    def _sampling_config(self) -> SamplingConfig:
        sampling = self.sampling
        return SamplingConfig(
            workers=sampling.sampler_workers,
            parallel=sampling.sampler_parallel or SINGLE,
            vllm=_vllm_config(sampling) if sampling.sampler == "vllm" else None,
            devices=tuple(sampling.sampler_device.split(",")) if sampling.sampler_device else (),
            directory=str((self.store.state_dir / "samplers").absolute()),
        )

    def _shared(self, target: type) -> dict[str, Any]:
        """Returns the values of the knobs that `target` also has as fields."""
        return {entry.name: self.value(entry.name) for entry in fields(target) if entry.name in KNOBS}


def _vllm_config(sampling: SamplingSection) -> VllmConfig:
    return VllmConfig(
        urls=tuple(sampling.vllm_url.split(",")) if sampling.vllm_url else (),
        api_key=sampling.vllm_api_key,
        python=str(sampling.vllm_python) if sampling.vllm_python else None,
        dtype=sampling.vllm_dtype,
        memory_share=sampling.vllm_memory_share,
        tensor_parallel=sampling.vllm_tp,
        draft=sampling.vllm_draft,
        draft_tokens=sampling.vllm_draft_tokens or VllmConfig.draft_tokens,
    )


def _by_section(knobs: Mapping[str, object]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name, value in knobs.items():
        found.setdefault(SECTION_OF[name], {})[name] = value
    return found


SECTIONS: Mapping[str, type[Section]] = get_type_hints(ServerConfig)
"""The sections by name."""
KNOBS: Mapping[str, Knob] = {name: knob for section in SECTIONS.values() for name, knob in knobs_of(section).items()}
"""All knobs by name, in the order of their sections."""
SECTION_OF = {name: section for section, declared in SECTIONS.items() for name in knobs_of(declared)}
