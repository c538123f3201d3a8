"""Prepares the base models of a configuration: those at URLs are downloaded, and those that differ only in their names
become one, which is loaded and planned for once.

If ranks may run on other machines, each of those downloads the same content itself, and this one leaves out the
weights.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...workers.models.model_cache import ModelCache, ModelUnavailableError
from ...workers.protocol.worker_config import DispatchConfig, ServedModel, WorkerConfig
from ..config.option_values import is_url
from ..config.server_config import ServerConfig
from ..files.state_lock import StartError

Each = TypeVar("Each")


async def download_models(config: ServerConfig, say: Callable[[str], None]) -> ServerConfig:
    """Returns the config with local directories as the sources of models at URLs. Raises StartError.

    On cancellation the download continues in a thread, which the process does not wait for (see `bounded_exit`).
    """
    thread = ThreadPoolExecutor(1, "base-models")
    try:
        models = await asyncio.get_running_loop().run_in_executor(thread, lambda: _downloaded(config, say))
    except ModelUnavailableError as error:
        raise StartError(str(error)) from None
    finally:
        thread.shutdown(wait=False)
    return config.with_options(base_models=models)


def _downloaded(config: ServerConfig, say: Callable[[str], None]) -> tuple[ServedModel, ...]:
    cache = ModelCache(config.models.model_cache)
    weights = config.sampling.vllm_python is not None or config.ranks.pool == "local"  # are loaded here
    models = []
    for model in config.models.base_models:
        origin = cache.newest(model.source) if is_url(model.source) else model.origin
        if origin is None or Path(model.source).is_dir():
            models.append(model)
        else:
            models.append(replace(model, source=str(cache.fetch(origin, say, weights)), origin=origin))
    return tuple(models)


def merge_identical_models(config: DispatchConfig) -> DispatchConfig:
    """Returns the config with each group of identical models reduced to the first; the other names become aliases of
    it.
    """
    first: dict[object, str] = {}
    aliases, numbers = dict(config.aliases), list[int]()
    for number, model in enumerate(config.models):
        name = model.model.name
        known = first.setdefault(_all_but_the_name(config, number, model), name)
        if known == name:
            numbers.append(number)
        else:
            aliases[name] = known
    if len(numbers) == len(config.models):
        return config
    groups = tuple(replace(group, devices=_entries_for(group.devices, numbers)) for group in config.role_groups)
    vllm = config.sampling.vllm
    sampling = replace(config.sampling, vllm=vllm and replace(vllm, urls=_entries_for(vllm.urls, numbers)))
    models = tuple(config.models[number] for number in numbers)
    return replace(config, models=models, aliases=aliases, role_groups=groups, sampling=sampling)


def _all_but_the_name(config: DispatchConfig, number: int, model: WorkerConfig) -> object:
    """Returns a key that is equal for models that differ only in name.

    Args:
        number: the model's position, which selects its entry in per-model lists of devices and servers.
    """
    path = Path(model.model.source)
    source = str(path.resolve()) if path.exists() else model.model.source
    devices = [_entry_for(group.devices, number) for group in config.role_groups]
    urls = config.sampling.vllm.urls if config.sampling.vllm is not None else ()
    return replace(model, model=ServedModel("", source, model.model.origin)), *devices, _entry_for(urls, number)


def _entry_for(values: Sequence[str], number: int) -> str | None:
    return values[number % len(values)] if values else None


def _entries_for(values: tuple[Each, ...], numbers: Sequence[int]) -> tuple[Each, ...]:
    """Selects the entries at `numbers` from a per-model list; a list shared by all models (at most one entry) stays as
    it is.
    """
    return values if len(values) <= 1 else tuple(values[number] for number in numbers)
