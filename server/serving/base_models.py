"""Downloads base models at URLs to this machine before anything reads them.

If ranks may run on other machines, each of those downloads the same content itself, and this one leaves out the
weights.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ...workers.models.model_cache import ModelCache, ModelUnavailableError
from ...workers.protocol.worker_config import ServedModel
from ..config.option_values import is_url
from ..config.server_config import ServerConfig
from ..files.state_lock import StartError


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
