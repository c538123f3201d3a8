"""`serve --parallel auto`: for each base model the smallest layout whose ranks fit their devices."""

import subprocess
from collections.abc import Callable
from dataclasses import replace

from ..workers.config import DispatchConfig, WorkerConfig
from ..workers.footprint import gigabytes, runs_on_cpu
from ..workers.parallel.checks import cuda_devices
from ..workers.parallel.choice import Choice, layout_that_fits, lighter
from ..workers.parallel.families import FAMILIES
from ..workers.parallel.load import Load
from ..workers.parallel.shape import ModelShape, read_model
from .config import ServerConfig

_ASKING = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_ASKING_SECONDS = 10.0


def with_layouts(config: DispatchConfig, device_bytes: int | None, say: Callable[[str], None]) -> DispatchConfig:
    """device_bytes: of each device, None = as the smallest CUDA device here has. Raises ValueError."""
    samples = not config.sampling.workers and config.sampling.vllm is None
    memory = device_bytes or _cuda_bytes()
    models = []
    for model in config.models:
        choice = _choice(model, memory, samples, is_local=config.pool == "local")
        needed = f"{gigabytes(choice.memory.total)} of {gigabytes(memory)} on each rank, as planned"
        way = "" if choice.load.activations == model.activations else f" --activations {choice.load.activations}"
        say(f"{model.model.name}: --parallel {choice.spec}{way} ({needed})")
        models.append(replace(model, parallel=choice.spec, activations=choice.load.activations))
    return replace(config, models=tuple(models))


def settled(config: ServerConfig, say: Callable[[str], None]) -> ServerConfig:
    """With the layout that all base models have then. Raises ValueError, also where they do not have the same."""
    if config.parallel is not None:
        return config
    models = with_layouts(config.dispatch_config(), config.device_memory_bytes, say).models
    chosen = {(model.parallel, model.activations): model.model.name for model in models}
    if len(chosen) > 1:
        layouts = ", ".join(f"{spec} for {name}" for (spec, _), name in chosen.items())
        raise ValueError(f"--parallel auto finds {layouts}: name one layout for all, or keep workers for each apart")
    return replace(config, parallel=models[0].parallel, activations=models[0].activations)


def _choice(model: WorkerConfig, memory: int, samples: bool, is_local: bool) -> Choice:
    shape = read_model(model.model)
    if not isinstance(shape, ModelShape):
        raise ValueError(
            f"--parallel auto: nothing is known of {shape.model_type} models such as {shape.name}, but of "
            f"{', '.join(FAMILIES)}: name a layout"
        )
    longest = model.max_context_length or shape.max_positions
    if longest is None:
        raise ValueError(f"--parallel auto: {shape.name} names no longest context: give --max-context-length")
    on_cpu = runs_on_cpu(model)
    dtype = ("float32" if on_cpu else "bfloat16") if model.dtype == "auto" else model.dtype
    num_devices = cuda_devices() if is_local and not on_cpu else None
    load = Load.of(model, longest, dtype, samples)
    return layout_that_fits(shape, [load, *lighter(load)], memory, num_devices)


def _cuda_bytes() -> int:
    """Asked of the driver's own command: this process uses no device."""
    try:
        asked = subprocess.run(_ASKING, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
        return min(int(line) << 20 for line in asked.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ValueError(
            "--parallel auto needs the memory of a device, and nvidia-smi tells of none here: give --device-memory, "
            "such as 80GB"
        ) from None
