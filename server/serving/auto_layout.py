"""`serve --parallel auto`: chooses, for each base model, the smallest layout whose ranks fit their devices."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from ...workers.models.devices import first_device
from ...workers.planner.checks import auto_refusal, check_layout, cuda_devices
from ...workers.planner.footprint import gigabytes, runs_on_cpu
from ...workers.planner.layout_search import PlannedLayout, layout_that_fits, loads_with_fewer_activations
from ...workers.planner.workload import Workload
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import DispatchConfig, WorkerConfig
from ...workers.shapes.model_shape import ModelShape, read_model

_ASKING = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_ASKING_SECONDS = 10.0


def with_layouts(config: DispatchConfig, device_bytes: int | None, say: Callable[[str], None]) -> DispatchConfig:
    """Returns the config with a layout and devices for each base model. Raises ValueError.

    Args:
        device_bytes: memory of each device; None takes that of the smallest CUDA device of this machine.
    """
    samples = not config.sampling.workers and config.sampling.vllm is None
    memory = device_bytes or _cuda_bytes()
    devices = _Devices(config)
    models = []
    for model in config.models:
        choice = _choice(model, memory, samples, devices.num_available(model))
        needed = f"{gigabytes(choice.memory.total)} of {gigabytes(memory)} on each rank, as planned"
        way = "" if choice.load.activations == model.activations else f" --activations {choice.load.activations}"
        device = devices.assign(model, choice.spec.num_ranks)
        where = "" if device == model.device else f" --device {device}"
        say(f"{model.model.name}: --parallel {choice.spec}{way}{where} ({needed})")
        models.append(replace(model, parallel=choice.spec, activations=choice.load.activations, device=device))
    return replace(config, models=tuple(models))


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
        """Marks `num_ranks` consecutive devices as taken, starting at each of `devices`."""
        for first in (first_device(device) for device in devices if device.startswith("cuda")):
            self._taken |= dict.fromkeys(range(first, first + num_ranks), name)

    def num_available(self, model: WorkerConfig) -> int | None:
        """Returns how many consecutive devices the model may use, or None if this process does not assign them."""
        if self._number is None or runs_on_cpu(model):
            return None
        first = self._first(model)
        if first in self._taken:
            raise ValueError(
                f"{model.model.name} has device cuda:{first}, which {self._taken[first]} uses: name another"
            )
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


def _choice(model: WorkerConfig, memory: int, samples: bool, num_devices: int | None) -> PlannedLayout:
    shape = read_model(model.model)
    check_layout(SINGLE, shape)
    if not isinstance(shape, ModelShape):
        raise ValueError(auto_refusal(shape))
    longest = model.max_context_length or shape.max_positions
    if longest is None:
        raise ValueError(f"--parallel auto: {shape.name} has no context length: give --max-context-length")
    on_cpu = runs_on_cpu(model)
    dtype = ("float32" if on_cpu else "bfloat16") if model.dtype == "auto" else model.dtype
    load = Workload.of(model, longest, dtype, samples)
    return layout_that_fits(shape, [load, *loads_with_fewer_activations(load)], memory, num_devices)


def _cuda_bytes() -> int:
    """Returns the smallest device memory according to nvidia-smi, so that this process need not open a device."""
    try:
        done = subprocess.run(_ASKING, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
        return min(int(line) << 20 for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ValueError(
            "--parallel auto needs the memory of a device, and nvidia-smi reports none here: give --device-memory, "
            "such as 80GB"
        ) from None
