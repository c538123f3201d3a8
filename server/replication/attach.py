"""Takes over the configuration of workers that another process runs, before the server starts."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...schemas.version import VERSION
from ...workers.pools.base import PlacementError
from ...workers.pools.remote.pool import describe
from ...workers.pools.remote.secure_channel import read_secret
from ...workers.protocol.aliases import merge_identical_models
from ...workers.protocol.worker_config import AttachClaim, DispatchConfig, KeptWorkersAddress, ServedModel, WorkerConfig
from ..config.knob import Knob
from ..config.knob_values import ConfigError
from ..config.server_config import KNOBS, ServerConfig
from .state_lock import StartError

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 30.0
"""Wait for workers that are started at the same time as the server."""
_LOOK_SECONDS = 1.0

_OF_WORKERS = {entry.name for entry in fields(WorkerConfig)} | {
    *("base_models", "shard", "role_groups", "sampler_workers", "sampler_parallel", "sampler_device"),
}
_OWN = {"hang_seconds", "model_cache", "shared_directories"}


def knobs_of_workers(config: ServerConfig) -> dict[str, Any]:
    """Returns the knobs that workers are created with. A server that attaches to workers cannot choose them."""
    return {name: config.value(name) for name in KNOBS if name in _OF_WORKERS - _OWN}


def dispatch_config(config: ServerConfig, at: KeptWorkersAddress | None, epoch: int | None) -> DispatchConfig:
    """Returns the dispatch configuration of the server.

    Args:
        at: as returned by `adopt_workers_config`.
        epoch: of the server's lease, if it needs one.
    """
    of_all = config.dispatch_config()
    if at is None:
        return merge_identical_models(of_all)
    return replace(of_all, kept=replace(at, claim=_new_claim(epoch)))


async def adopt_workers_config(config: ServerConfig) -> tuple[ServerConfig, KeptWorkersAddress | None]:
    """Returns the configuration with the workers' base models, layout and other knobs, and where the workers are.

    The second value is None if the server runs its own workers. Raises StartError.
    """
    if config.attach.workers is None or config.attach.workers_secret_file is None:
        return config, None
    at = KeptWorkersAddress(config.attach.workers, _secret(config.attach.workers_secret_file), _new_claim(None))
    knobs = await _knobs_at(at)
    _check_known(knobs, at.address)
    if config.sampling.sampler == "vllm":
        knobs = {name: value for name, value in knobs.items() if not name.startswith("sampler_")}
    for name in sorted(knobs, key=list(KNOBS).index):
        _check_same(config, KNOBS[name], knobs[name], at.address)
    own = {"base_models": config.models.base_models} if config.models.base_models else {}
    try:
        return config.with_knobs(**{**knobs, **own}), replace(at, knobs=knobs)
    except ConfigError as error:
        raise StartError(f"{error} (configured by the workers at {at.address})") from None


def _secret(file: Path) -> bytes:
    try:
        return read_secret(file)
    except ValueError as error:
        raise StartError(str(error)) from None


def _new_claim(epoch: int | None) -> AttachClaim:
    return AttachClaim(secrets.token_hex(8), epoch)


async def _knobs_at(at: KeptWorkersAddress) -> Mapping[str, Any]:
    deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    while True:
        try:
            return (await describe(at)).knobs
        except PlacementError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise StartError(f"{error}: start them with `trainhouse workers --listen {at.address}`") from None
            logger.warning("%s: waiting for the workers", error)
        except ValueError as error:
            raise StartError(str(error)) from None
        await asyncio.sleep(_LOOK_SECONDS)


def _check_known(knobs: Mapping[str, Any], address: str) -> None:
    if unknown := knobs.keys() - KNOBS.keys():
        raise StartError(
            f"the workers at {address} have {', '.join(sorted(unknown))}, which this trainhouse ({VERSION}) does not "
            "support: run the same version on both sides"
        )


def _check_same(config: ServerConfig, knob: Knob, theirs: object, address: str) -> None:
    mine = config.value(knob.name)
    if mine == knob.default or _names(mine) == _names(theirs):
        return
    raise StartError(
        f"{knob.flag} is {_shown(mine)} here and {_shown(theirs)} at the workers at {address}: leave it out here, "
        "or restart the workers with it"
    )


def _names(value: object) -> object:
    """Reduces base models to their names: the paths of their files may differ between machines."""
    if not isinstance(value, tuple):
        return value
    return [each.name if isinstance(each, ServedModel) else each for each in value]


def _shown(value: object) -> str:
    names = _names(value)
    return ", ".join(map(str, names)) if isinstance(names, list) else str(value)
