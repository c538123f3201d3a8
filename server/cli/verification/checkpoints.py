"""Checks checkpoints and their copies at mirrors."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...config.option_values import is_url
from ...files.manifest import ManifestMismatch, check_directory, read_manifest
from ...files.object_store import ObjectStoreError
from ...store import CheckpointCopyRecord, checkpoint_path
from ...store.database.schema import checkpoint_copies, checkpoints
from .problem import Problem, Repair
from .state import VerifiedState


async def check_checkpoints(state: VerifiedState) -> AsyncIterator[Problem]:
    for row in await state.rows(checkpoints):
        directory = state.moves.get(row.directory, row.directory)
        path = checkpoint_path(row.run_id, row.kind, row.name)
        try:
            if is_url(directory):
                manifest = await state.object_store.check(directory)
            else:
                await asyncio.to_thread(check_directory, Path(directory))
                manifest = await asyncio.to_thread(read_manifest, Path(directory))
        except (ObjectStoreError, ManifestMismatch) as error:
            yield await _damaged(state, path, directory, error.reason)
        else:
            if manifest.get("tinker_path") != path:
                meaning = f"the files in {directory} are those of {manifest.get('tinker_path')}"
                yield Problem(path, meaning, f"restore its files from a backup, or {_deletion(path)}")


async def _damaged(state: VerifiedState, path: str, directory: str, reason: str) -> Problem:
    async def restore() -> None:
        async with state.files.reading(directory) as here:
            if is_url(directory):
                await state.object_store.upload(here, directory)

    copies = await state.copies_of(directory)
    repair = Repair("restores it from its mirror", restore, "restored from its mirror") if copies else None
    lacks = "no mirror has a whole copy" if copies else "it has no copy at a mirror"
    remedy = f"{lacks}: restore {directory} from a backup, or {_deletion(path)}"
    return Problem(path, f"is damaged: {reason}", remedy, repair)


def _deletion(path: str) -> str:
    return f"delete it: tinker checkpoint delete {path}"


async def check_copies(state: VerifiedState) -> AsyncIterator[Problem]:
    paths = {row.directory: checkpoint_path(row.run_id, row.kind, row.name) for row in await state.rows(checkpoints)}
    for row in await state.rows(checkpoint_copies):
        if row.state != "copied":
            continue
        try:
            await state.object_store.check(row.url)
        except ObjectStoreError as error:
            waiting = replace(CheckpointCopyRecord(**row._mapping), state="waiting", num_tries=0)
            meaning = f"the copy of {paths.get(row.directory, row.directory)} is damaged: {error.reason}"
            again = partial(state.store.copies.put, waiting)
            repair = Repair("has it copied again", again, "the server will copy it again")
            yield Problem(row.url, meaning, "delete it there, and run with --repair", repair)
