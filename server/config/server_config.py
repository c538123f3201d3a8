"""ServerConfig: all options of a server, checked together, and the configs of workers and stores made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from ...schemas.adapters.model_files import is_loopback
from ...workers.protocol.option import values_of
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import (
    DispatchConfig,
    MemoryOptions,
    ModelOptions,
    PoolOptions,
    RankOptions,
    SamplingConfig,
    SchedulerOptions,
    ServedModel,
    VllmConfig,
    WorkerConfig,
)
from ...workers.shapes.styles import replicated_units
from ..files.storage_config import CheckpointOptions, CheckpointStorageConfig
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
from .option import Option, options_of
from .option_values import is_url
from .sections import (
    FeaturesSection,
    JournalSection,
    LimitsSection,
    ModelsSection,
    NetworkSection,
    ProcessSection,
    RanksSection,
    SamplingSection,
    SchedulerSection,
    SdkSection,
    SessionsSection,
)
from .store_section import StoreSection


@dataclass(frozen=True)
class ServerConfig:
    """All options of a server process, in sections; `trainhouse serve --help-all` lists them.

    Flags, environment variables and the file name an option without its section: see `of`.
    """

    models: ModelsSection = field(default_factory=ModelsSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    store: StoreSection = field(default_factory=StoreSection)
    ranks: RanksSection = field(default_factory=RanksSection)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    sessions: SessionsSection = field(default_factory=SessionsSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    journal: JournalSection = field(default_factory=JournalSection)
    checkpoint_storage: CheckpointOptions = field(default_factory=CheckpointOptions)
    sdk: SdkSection = field(default_factory=SdkSection)
    process: ProcessSection = field(default_factory=ProcessSection)

    def __post_init__(self) -> None:
        """Checks the values against each other; `of` has checked each of them. Raises ConfigError."""
        check_network(self.network, self.store)
        check_limits(self.limits)
        check_models(self.models, self.ranks)
        check_kept_workers(self.ranks, self.scheduler)
        check_role_groups(self.models, self.ranks)
        check_sampling(self.models, self.sampling)
        check_ranks(self.ranks)
        check_storage(self.checkpoint_storage)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Returns the config with these options, named without their sections. Raises ConfigError."""
        return cls(**{name: SECTIONS[name](**own) for name, own in _by_section(options).items()})

    def with_options(self, **options: Any) -> Self:
        """Returns a copy with other values of these options. Raises ConfigError."""
        sections = _by_section(options).items()
        return replace(self, **{name: replace(getattr(self, name), **own) for name, own in sections})

    def value(self, option: str) -> Any:
        return getattr(getattr(self, SECTION_OF[option]), option)

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
        options = values_of(ModelOptions, self.models) | values_of(RankOptions, self.ranks) | vars(self.memory)
        options["device"] = devices[base_models.index(model) if len(devices) > 1 else 0]
        options["model_cache"] = None if cache is None else cache.absolute()
        return WorkerConfig(
            model=model,
            parallel=replace(self.ranks.parallel or SINGLE, replicated=replicated_units(self.ranks.shard)),
            page_directory=pages,
            shared_directories=self._shared_directories,
            **options,
        )

    @property
    def _shared_directories(self) -> tuple[str, ...]:
        if self.ranks.pool != "ray":
            return ()
        place = self.checkpoint_storage.checkpoints
        checkpoints = () if place is None or is_url(place) else (Path(place),)
        return tuple(str(each.expanduser().absolute()) for each in (self.store.state_dir, *checkpoints))

    def storage_config(self) -> CheckpointStorageConfig:
        limits = self.limits
        return CheckpointStorageConfig(
            **vars(self.checkpoint_storage),
            tenant_checkpoints=limits.tenant_checkpoints,
            tenant_checkpoint_bytes=limits.tenant_checkpoint_bytes,
        )

    def dispatch_config(self) -> DispatchConfig:
        return DispatchConfig(
            models=tuple(self.worker_config(model) for model in self.models.base_models),
            tenant_weights={tenant.name: tenant.weight for tenant in self.scheduler.tenant_weights},
            sampling=self._sampling_config(),
            **values_of(PoolOptions, self.ranks),
            **values_of(SchedulerOptions, self.scheduler),
        )

    def _sampling_config(self) -> SamplingConfig:
        sampling = self.sampling
        return SamplingConfig(
            workers=sampling.sampler_workers,
            parallel=sampling.sampler_parallel or SINGLE,
            vllm=_vllm_config(sampling) if sampling.sampler == "vllm" else None,
            devices=tuple(sampling.sampler_device.split(",")) if sampling.sampler_device else (),
            directory=str((self.store.state_dir / "samplers").absolute()),
        )


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


def _by_section(options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Returns the options in their sections. Raises ConfigError if a value is refused."""
    found: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        found.setdefault(SECTION_OF[name], {})[name] = OPTIONS[name].checked(value)
    return found


SECTIONS: Mapping[str, type[Any]] = get_type_hints(ServerConfig)
"""The sections by name."""
OPTIONS: Mapping[str, Option] = {name: each for kind in SECTIONS.values() for name, each in options_of(kind).items()}
"""All options by name, in the order of their sections."""
SECTION_OF = {name: section for section, kind in SECTIONS.items() for name in options_of(kind)}
