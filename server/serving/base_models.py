"""Downloads base models at URLs to this machine before anything reads them.

If ranks may run on other machines, each of those downloads the same content itself, and this one leaves out the
weights.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ...workers.models.model_cache import ModelCache, NoModel
from ...workers.protocol.config import ServedModel
from ..config.knobs import ServerConfig
from ..config.values import is_url
from ..replication.state_lock import StartError


async def with_models_here(config: ServerConfig, say: Callable[[str], None]) -> ServerConfig:
    """Returns the config with local directories as the sources of models at URLs. Raises StartError.

    On cancellation the download continues in a thread, which the process does not wait for (see `left_soon`).
    """
    thread = ThreadPoolExecutor(1, "base-models")
    try:
        models = await asyncio.get_running_loop().run_in_executor(thread, lambda: _brought(config, say))
    except NoModel as error:
        raise StartError(str(error)) from None
    finally:
        thread.shutdown(wait=False)
    return replace(config, base_models=models)


def _brought(config: ServerConfig, say: Callable[[str], None]) -> tuple[ServedModel, ...]:
    cache, weights = ModelCache(config.model_cache), _are_loaded_here(config)
    models = []
    for model in config.base_models:
        origin = cache.newest(model.source) if is_url(model.source) else model.origin
        if origin is None or Path(model.source).is_dir():
            models.append(model)
        else:
            models.append(replace(model, source=str(cache.bring(origin, say, weights)), origin=origin))
    return tuple(models)


def _are_loaded_here(config: ServerConfig) -> bool:
    return config.vllm_python is not None or (config.workers is None and config.pool == "local")
