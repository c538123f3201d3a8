"""Finds files that no row refers to: left over, or of a checkpoint whose row was lost."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoints.leftovers import UNLISTED_DAYS, has_complete_files, path_of_lost_row, restore_row
from ...config.option_values import is_url
from ...files.directories import STAGING, directory_name
from ...files.manifest import MANIFEST, check_directory, read_manifest
from ...files.object_store import ObjectStoreError
from .problem import Problem, Repair, removal
from .state import VerifiedState

_UNKNOWN = "no row of this database refers to it: it belongs to another database, or is left over"
_BY_HAND = "delete it there by hand, unless it belongs to another database"


async def check_leftovers(state: VerifiedState) -> AsyncIterator[Problem]:
    rows = await state.store.checkpoints.list_directories()
    published = {state.moves.get(directory, directory) for directory in rows}
    live = {directory_name(run.run_id) for run in await state.live_runs()}
    adapters = {directory_name(one) for one in await state.live_adapters()}
    root = state.live_dir
    for path in sorted((*state.files.local_root.glob("*/*/*"), *state.state_dir.glob("staging/*"))):
        is_ours = _is_ours(state, path) and str(path) not in published
        if is_ours and not path.name.startswith(STAGING) and await asyncio.to_thread(has_complete_files, path):
            yield await _unlisted(state, path)
        elif path.name.startswith(STAGING) or is_ours:
            yield _leftover(path, "a checkpoint that was never published, or that was deleted")
    roots = [root / name for name in ("snapshots", "loaded", "evaluations")]
    for path in sorted(path for one in roots for path in (*one.glob("*"), *one.glob(f"*/{STAGING}*"))):
        if path.name.startswith(STAGING) or path.name not in live:
            yield _leftover(path, "files of a run that has ended, or that were never finished")
    for path in sorted(root.glob("ephemeral/*")):
        if path.name not in adapters:
            yield _leftover(path, "the weights of a sampler that has ended, or that were never finished")


def _leftover(path: Path, what: str) -> Problem:
    return Problem(str(path), f"left over: {what}", "delete it by hand", removal(path))


def _is_ours(state: VerifiedState, path: Path) -> bool:
    """True if the directory belongs to a run of this database, or, by its manifest, to one that it once had."""
    if path.parent.parent.name in state.run_directories:
        return True
    return state.files.is_ours_alone(path) and has_complete_files(path) and "tenant_id" in read_manifest(path)


async def _unlisted(state: VerifiedState, path: Path) -> Problem:
    when = f"servers remove it {UNLISTED_DAYS} days after one first reported it"
    remedy = f"delete it by hand, or leave it: {when}"
    manifest = await asyncio.to_thread(read_manifest, path)
    lost = await path_of_lost_row(state.store, str(path), manifest, state.files.is_ours_alone(path))
    if lost is None:
        return Problem(str(path), f"is whole, but {_UNKNOWN}", remedy)
    return _lost_row(state, str(path), manifest, lost, remedy)


def _lost_row(state: VerifiedState, directory: str, manifest: Mapping[str, Any], path: str, remedy: str) -> Problem:
    async def restore() -> None:
        checked = manifest
        if is_url(directory):
            checked = await state.object_store.check(directory)
        else:
            await asyncio.to_thread(check_directory, Path(directory))
        await restore_row(state.store, directory, checked)

    repair = Repair("restores its row", restore, f"{path} has its row again")
    return Problem(directory, f"is whole, but the database has no row of {path}", remedy, repair)


async def check_leftovers_at_url(state: VerifiedState) -> AsyncIterator[Problem]:
    root = state.config.checkpoints
    if root is None or not is_url(root):
        return
    published = await state.store.checkpoints.list_directories()
    try:
        found = await state.object_store.list(root)
    except ObjectStoreError as error:
        yield Problem(root, f"cannot be listed: {error.reason}", "check whether it can be reached from here")
        return
    for key, names in found.items():
        url = f"{root.rstrip('/')}/{key}"
        if url in published:
            continue
        if MANIFEST in names:
            yield await _unlisted_at(state, url)
        elif key.partition("/")[0] not in state.run_directories:
            yield Problem(url, _UNKNOWN, _BY_HAND)
        else:
            repair = Repair("removes it", partial(state.object_store.remove, url), "removed")
            yield Problem(url, "left over: never published, or deleted", "delete it there by hand", repair)


async def _unlisted_at(state: VerifiedState, url: str) -> Problem:
    try:
        manifest = await state.object_store.check(url)
    except ObjectStoreError as error:
        return Problem(url, f"{_UNKNOWN}, and damaged: {error.reason}", _BY_HAND)
    lost = await path_of_lost_row(state.store, url, manifest, is_ours_alone=False)
    return Problem(url, _UNKNOWN, _BY_HAND) if lost is None else _lost_row(state, url, manifest, lost, _BY_HAND)
