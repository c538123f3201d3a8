"""`serve --parallel auto`: chooses, for each base model, the smallest layout whose ranks fit their devices.

`--sampler-parallel auto` does it for the model's sampler workers.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from ...workers.planner.device_rates import link_of
from ...workers.planner.layout_search import layout_that_fits, loads_with_fewer_activations, smallest_sampler_layout
from ...workers.planner.workload import Workload
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import (
    DEFAULT_PREFILL_CHUNK_TOKENS,
    GPU_PREFILL_CHUNK_TOKENS,
    DispatchConfig,
    SamplingConfig,
    WorkerConfig,
)
from ...workers.resources.devices import first_device
from ...workers.resources.machine import cuda_devices, gigabytes, loaded_dtype, runs_on_cpu
from ...workers.shapes.layouts.checks import check_layout
from ...workers.shapes.model_shape import ModelDescription, ModelShape, read_model

if TYPE_CHECKING:
    from ..config.server_config import ServerConfig  # needs sqlalchemy, which an install of the client lacks

_ASKING = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_ASKING_SECONDS = 10.0


def with_auto_layouts(config: "ServerConfig", settings: DispatchConfig, say: Callable[[str], None]) -> DispatchConfig:
    """Returns the settings with a layout wherever the server's config has auto. Raises ValueError."""
    device_bytes, link = config.ranks.device_memory_bytes, config.ranks.device_link
    if config.sampling.sampler_parallel is None:
        number = cuda_devices() if config.ranks.pool == "local" else None
        settings = with_sampler_layout(settings, device_bytes, number, say)
    return settings if config.ranks.parallel is not None else with_layouts(settings, device_bytes, link, say)


def with_layouts(
    config: DispatchConfig, device_bytes: int | None, link: str, say: Callable[[str], None]
) -> DispatchConfig:
    """Returns the config with a layout and devices for each base model. Without `device_bytes`, those of this machine's
    smallest CUDA device count; `link` is a value of --device-link. Raises ValueError."""
    samples = not config.sampling.workers and config.sampling.vllm is None
    memory = device_bytes or _cuda_bytes()
    devices = _Devices(config)
    models = []
    for model in config.models:
        shape = _shape(model)
        load, link_rate = _load(model, shape, samples), link_of(link, runs_on_cpu(model))
        loads = [load, *loads_with_fewer_activations(load)]
        choice = layout_that_fits(shape, loads, memory, devices.num_available(model), link_rate, with_replicas=False)
        needed = f"{gigabytes(choice.memory.total)} of {gigabytes(memory)} on each rank, as planned"
        way = "" if choice.load.activations == model.activations else f" --activations {choice.load.activations}"
        device = devices.assign(model, choice.spec.num_ranks)
        where = "" if device == model.device else f" --device {device}"
        say(f"{model.model.name}: --parallel {choice.spec.axes}{way}{where} ({needed})")
        models.append(replace(model, parallel=choice.spec, activations=choice.load.activations, device=device))
    return replace(config, models=tuple(models))


def with_sampler_layout(
    config: DispatchConfig, device_bytes: int | None, num_devices: int | None, say: Callable[[str], None]
) -> DispatchConfig:
    """Returns the config with a layout for the sampler workers of its base model; `num_devices` is None if unknown.
    Raises ValueError."""
    if len(config.models) != 1:
        raise ValueError(
            f"--sampler-parallel auto chooses for one base model, and there are {len(config.models)}: name a layout"
        )
    (model,), sampling = tuple(config.models), config.sampling
    sampler = replace(model, device=sampling.devices[0]) if sampling.devices else model
    on_cpu = runs_on_cpu(sampler)
    if not (on_cpu or sampling.devices):
        raise ValueError(
            "--sampler-parallel auto cannot divide devices with training: name devices with --sampler-device, or a "
            "layout"
        )
    memory, shape = device_bytes or _cuda_bytes(), _shape(model)
    own = None if on_cpu or num_devices is None else _num_of_each_sampler(model, sampling, num_devices)
    usual = DEFAULT_PREFILL_CHUNK_TOKENS if on_cpu else GPU_PREFILL_CHUNK_TOKENS
    load = _load(sampler, shape, True)
    choice = smallest_sampler_layout(shape, load, model.prefill_chunk_tokens or usual, memory, own)
    needed = f"{gigabytes(choice.num_bytes)} of {gigabytes(memory)} on each rank, as planned"
    say(f"samplers of {shape.name}: --sampler-parallel {choice.spec.axes} ({needed})")
    return replace(config, sampling=replace(sampling, parallel=choice.spec))


def _num_of_each_sampler(model: WorkerConfig, sampling: SamplingConfig, num_devices: int) -> int:
    """Returns how many consecutive CUDA devices each sampler worker may use: up to the next worker's, or training's."""
    firsts = sorted({first_device(device) for device in sampling.devices})
    named = [first_device(model.device)] if ":" in model.device else []
    stops = [min((each for each in (*firsts, *named, num_devices) if each > first), default=first) for first in firsts]
    return max(1, min(stop - first for first, stop in zip(firsts, stops, strict=True)))


def auto_refusal(model: ModelDescription) -> str:
    return f"--parallel auto: {by_transformers(model)}: give a layout, such as replicas=2"


def by_transformers(model: ModelDescription) -> str:
    """Returns what it means for a model that it is of no type with layers of our own."""
    return (
        f"{model.name} ({model.model_type}) runs by transformers' modules, on one rank or on replicas, and its memory "
        "is not planned; docs/models.md lists the types for which it is"
    )


class _Devices:
    """The CUDA devices of this machine, each of which is assigned to one rank of one base model."""

    def __init__(self, config: DispatchConfig) -> None:
        self._number = cuda_devices() if config.pool == "local" else None
        self._taken: dict[int, str] = {}
        sampling = config.sampling
        samples_here = sampling.workers > 0 or (sampling.vllm is not None and not sampling.vllm.urls)
        if self._number and samples_here and not (sampling.devices or runs_on_cpu(config.models[0])):
            raise ValueError(
                "--parallel auto leaves no room for samplers on the training devices: name devices for them with "
                "--sampler-device, or a layout with --parallel"
            )
        self._take(sampling.devices, sampling.parallel.num_ranks, "a sampler")
        for group in config.role_groups:
            if self._number and not (group.devices or runs_on_cpu(config.models[0])):
                raise ValueError(
                    f"--parallel auto leaves no room on the devices of the policies for --role-group {group}: name "
                    f"devices for it, as in {group}@cuda:{self._number - 1}, or a layout with --parallel"
                )
            self._take(group.devices, group.parallel.num_ranks, f"--role-group {group}")

    def _take(self, devices: Sequence[str], num_ranks: int, name: str) -> None:
        for first in (first_device(device) for device in devices if device.startswith("cuda")):
            self._taken |= dict.fromkeys(range(first, first + num_ranks), name)

    def num_available(self, model: WorkerConfig) -> int | None:
        """Returns how many consecutive devices the model may use, or None if this process does not assign them."""
        if self._number is None or runs_on_cpu(model):
            return None
        first = self._first(model)
        if first in self._taken:
            used = f"has device cuda:{first}, which {self._taken[first]} uses"
            raise ValueError(f"{model.model.name} {used}: name another")
        following = next((number for number in sorted(self._taken) if number > first), self._number)
        if following <= first:
            raise ValueError(
                f"no device is left for {model.model.name}: others use all {self._number}; name layouts with "
                "--parallel, or serve it elsewhere"
            )
        return following - first

    def assign(self, model: WorkerConfig, num_ranks: int) -> str:
        """Assigns devices to the model; returns the value of its --device."""
        if self._number is None or runs_on_cpu(model):
            return model.device
        first = self._first(model)
        self._taken |= dict.fromkeys(range(first, first + num_ranks), model.model.name)
        return f"cuda:{first}" if first else model.device

    def _first(self, model: WorkerConfig) -> int:
        if ":" in model.device:
            return first_device(model.device)
        return next(number for number in count() if number not in self._taken)


def _shape(model: WorkerConfig) -> ModelShape:
    shape = read_model(model.model)
    check_layout(SINGLE, shape)
    if not isinstance(shape, ModelShape):
        raise ValueError(auto_refusal(shape))
    return shape


def _load(model: WorkerConfig, shape: ModelShape, samples: bool) -> Workload:
    longest = model.max_context_length or shape.max_positions
    if longest is None:
        raise ValueError(f"--parallel auto: {shape.name} has no context length: give --max-context-length")
    return Workload.of(model, longest, loaded_dtype(model), samples, runs_on_cpu(model))


def _cuda_bytes() -> int:
    """Returns the smallest device memory according to nvidia-smi, so that this process need not open a device."""
    try:
        done = subprocess.run(_ASKING, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
        return min(int(line) << 20 for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ValueError(
            "auto needs the memory of a device, and nvidia-smi reports none here: give --device-memory, such as 80GB"
        ) from None
