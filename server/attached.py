"""Attached: what a server takes over from workers that another process keeps, before it begins."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..workers.config import DispatchConfig, WorkerConfig
from ..workers.pools import Claim, KeptAt, NoPlace
from ..workers.pools.remote import describe
from ..workers.pools.sealed import read_secret
from .claim import StartError
from .config import ConfigError, ServerConfig, flag_of

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0
"""Where both are started at a time."""
_LOOK_SECONDS = 1.0

_OF_WORKERS = {entry.name for entry in fields(WorkerConfig)} | {"sampler_workers", "sampler_device"}
_OWN = {"hang_seconds", "shared_directories"}


def knobs_of_workers(config: ServerConfig) -> dict[str, Any]:
    """Those by which workers are made, and so no server's to choose that attaches to them."""
    names = [entry.name for entry in fields(config) if entry.name in _OF_WORKERS - _OWN]
    return {name: getattr(config, name) for name in ("base_models", *names)}


def kept_at(config: ServerConfig, epoch: int | None) -> KeptAt | None:
    """epoch: of the server's lease, where it needs one. Raises StartError."""
    if config.workers is None or config.workers_secret_file is None:
        return None
    try:
        return KeptAt(config.workers, read_secret(config.workers_secret_file), Claim(secrets.token_hex(8), epoch))
    except ValueError as error:
        raise StartError(str(error)) from None


def dispatch_config(config: ServerConfig, epoch: int | None) -> DispatchConfig:
    """Raises StartError."""
    return replace(config.dispatch_config(), kept=kept_at(config, epoch))


async def with_workers(config: ServerConfig) -> ServerConfig:
    """With the base models, the layout and all else that is as the workers were started. Raises StartError."""
    at = kept_at(config, None)
    if at is None:
        return config
    knobs = dict(await _knobs_at(at))
    if config.sampler == "vllm":
        knobs = {name: value for name, value in knobs.items() if not name.startswith("sampler_")}
    for name, value in knobs.items():
        _check_same(config, name, value, at.address)
    if config.base_models:
        knobs["base_models"] = config.base_models
    try:
        return replace(config, **knobs)
    except ConfigError as error:
        raise StartError(f"{error} (as the workers at {at.address} have it)") from None


async def _knobs_at(at: KeptAt) -> Mapping[str, Any]:
    deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    while True:
        try:
            return (await describe(at)).knobs
        except NoPlace as error:
            if asyncio.get_running_loop().time() > deadline:
                raise StartError(f"{error}: start them with `trainhouse workers --listen {at.address}`") from None
            logger.warning("%s: waiting for them", error)
        except ValueError as error:
            raise StartError(str(error)) from None
        await asyncio.sleep(_LOOK_SECONDS)


def _check_same(config: ServerConfig, name: str, theirs: object, address: str) -> None:
    entry = next(entry for entry in fields(config) if entry.name == name)
    mine = getattr(config, name)
    if mine == entry.default or _names(mine) == _names(theirs):
        return
    raise StartError(
        f"{flag_of(entry)} is {_shown(mine)} here and {_shown(theirs)} at the workers at {address}: leave it out here, "
        "or start them anew with it"
    )


def _names(value: object) -> object:
    """Of base models: where their files lie may differ from machine to machine."""
    return [model.name for model in value] if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    names = _names(value)
    return ", ".join(map(str, names)) if isinstance(names, list) else str(value)
