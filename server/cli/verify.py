"""`trainhouse verify`: checks everything below a state directory, reports what is damaged, and repairs what is safe to.

While a server runs, it only checks, twice, and reports the problems found both times: files change in between.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection
from sqlalchemy.exc import DatabaseError

from ...schemas.errors import OperationError
from ..config.load import load_section
from ..files.manifest import ManifestMismatch
from ..files.object_store import ObjectStore, ObjectStoreError
from ..files.segment import SEGMENT_DIRECTORIES
from ..files.state_lock import (
    StartError,
    check_database_exists,
    check_database_kind,
    live_directory,
    locked_state_directory,
)
from ..files.storage_config import CheckpointStorageConfig
from ..store import LIVE_STATE, Store, StoreConfig, open_store
from ..store.database.schema import checkpoint_copies, checkpoints, results
from ..store.sqlite import DAMAGE_REMEDY
from .errors import FAILED
from .options import AsJson, Status, new_app
from .output import print_json, spinner
from .server_flags import Sources, reads_state
from .verification.checkpoints import check_checkpoints, check_copies
from .verification.leftovers import check_leftovers, check_leftovers_at_url
from .verification.problem import Problem, Repair
from .verification.runs import check_ephemeral, check_evaluations, check_features, check_loaded, check_snapshots
from .verification.segments import check_results, check_segments
from .verification.state import VerifiedState

_CHECKS = (
    *(check_checkpoints, check_copies, check_snapshots, check_loaded, check_segments, check_results),
    check_ephemeral,
    check_evaluations,
    check_features,
)
_CHECKS_OF_STOPPED = (check_leftovers, check_leftovers_at_url)
"""Checks that a running server would confuse: it writes files before their rows."""

_MOVING_SECONDS = 1.0


app = new_app()


@app.command("verify")
@reads_state(checkpoints="The server's --checkpoints, if it has one.")
def verify_state(
    sources: Sources,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is safe to; needs the server stopped.")] = False,
    as_json: AsJson = False,
) -> Status:
    """Check a server's state, while it runs or not, for damage. The exit status is 1 if problems are left."""
    store_config, storage_config = load_section(StoreConfig, *sources), load_section(CheckpointStorageConfig, *sources)
    check_database_kind(store_config)
    check_database_exists(store_config)
    logging.disable()  # verify itself reports what it finds
    said: list[str] = []
    try:
        with (
            lock_to_verify(store_config.state_dir, repair) as is_running,
            closing(open_store(store_config)) as store,
            spinner(f"checking {store_config.state_dir}"),
        ):
            work = verify(store, store_config.state_dir, storage_config, is_running, repair, said.append)
            num_left = asyncio.run(work)
    finally:
        logging.disable(logging.NOTSET)
    if as_json:
        print_json({"problems": said[:-1], "summary": said[-1], "num_left": num_left})
    else:
        print("\n".join(said))
    return FAILED if num_left else 0


@contextmanager
def lock_to_verify(state_dir: Path, repair: bool) -> Iterator[bool]:
    """Yields True if a server runs on the state directory; otherwise locks it, so that none can start meanwhile. Raises
    StartError if a server runs and `repair` is True, ValueError if there is no such directory."""
    if not state_dir.is_dir():
        raise ValueError(f"there is no state directory {state_dir}: name it with --state-dir")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_state_directory(state_dir))
        except StartError:
            if repair:
                raise
            yield True
        else:
            yield False


async def verify(
    store: Store,
    state_dir: Path,
    config: CheckpointStorageConfig,
    is_running: bool,
    repair: bool,
    say: Callable[[str], None],
) -> int:
    """Says each problem in one line; returns how many are left. Raises ValueError if `repair` is True, but a server
    uses the state directory, or it belongs to another database."""
    try:
        if repair:
            await _check_epoch(store, state_dir)
        leases = () if is_running else await store.leases.list_all()
        holder = next((lease.url for lease in leases if lease.expires_at > time.time()), None)
    except DatabaseError as error:
        say(f"database: {error.orig}; {DAMAGE_REMEDY}")
        return 1
    if holder is not None:
        if repair:
            raise ValueError(f"the server at {holder} uses this state directory: stop all servers on it first")
        is_running = True
    with closing(ObjectStore(())) as object_store:
        state = VerifiedState(store, state_dir, object_store, config)
        found = await _find_problems(state, is_running)
        problems = found.problems
        if is_running and problems:
            await asyncio.sleep(_MOVING_SECONDS)
            found = await _find_problems(state, is_running)
            again = {str(problem) for problem in found.problems}
            problems = [problem for problem in problems if str(problem) in again]
        num_left = 0
        for problem in problems:
            then = _advice(problem, is_running, repair)
            if repair and problem.repair is not None and await _try_repair(problem.repair):
                then = f"repaired: {problem.repair.done}"
            else:
                num_left += 1
            say(f"{problem}; {then}")
        is_all = "all is whole" if found.has_all_copies else "all that exists is whole"
        say(f"{found.counts}: {_num(num_left, 'problem') if num_left else is_all}")
        return num_left


async def _check_epoch(store: Store, state_dir: Path) -> None:
    """Raises ValueError, like a server that takes the live state, if the state directory belongs to another database:
    all its files would seem to be left over."""
    live = live_directory(state_dir)
    epochs = [lease.epoch for lease in await store.leases.list_all() if lease.base_model == LIVE_STATE]
    known = max(epochs, default=0)
    if live != state_dir and int(live.name.removeprefix("live-")) > known:
        raise ValueError(
            f"state directory {state_dir} has {live.name}, but the database is at epoch {known}: it belongs to another "
            "database; name a matching pair with --state-dir and --database-url"
        )


async def _try_repair(repair: Repair) -> bool:
    try:
        await repair.work()
    except (OperationError, ObjectStoreError, OSError, ManifestMismatch):
        return False
    return True


def _advice(problem: Problem, is_running: bool, was_tried: bool) -> str:
    if problem.repair is None or was_tried:
        return problem.remedy
    return f"{'stop the server and ' if is_running else ''}run with --repair, which {problem.repair.does}"


@dataclass(frozen=True)
class Findings:
    """The problems, and the numbers of what was checked."""

    problems: Sequence[Problem]
    counts: str
    has_all_copies: bool = True


async def _find_problems(state: VerifiedState, is_running: bool) -> Findings:
    if damages := [problem async for problem in _check_database(state.store)]:
        return Findings(damages, "the files were not checked, because the database's records of them cannot be trusted")
    await state.read_names()
    checks = _CHECKS if is_running else (*_CHECKS, *_CHECKS_OF_STOPPED)
    problems = [problem for check in checks async for problem in check(state)]
    copies = [row.state for row in await state.rows(checkpoint_copies)]
    missing = [f"{copies.count(each)} {each}" for each in ("waiting", "failed") if each in copies]
    counts = (
        _num(len(await state.rows(checkpoints)), "checkpoint"),
        _num(len(copies), "copy", "copies") + (f" ({', '.join(missing)})" if missing else ""),
        _num(len(await state.rows(results)), "result"),
        _num(len(list(state.live_dir.glob("snapshots/*/[0-9]*"))), "snapshot"),
        _num(sum(len(list(state.live_dir.glob(f"{name}/*.segment"))) for name in SEGMENT_DIRECTORIES), "segment"),
    )
    return Findings(problems, ", ".join(counts), not missing)


async def _check_database(store: Store) -> AsyncIterator[Problem]:
    def statements(connection: Connection) -> Sequence[str]:
        is_sqlite = connection.dialect.name == "sqlite"
        return connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() if is_sqlite else ["ok"]

    try:
        lines = await store.read(statements)
    except DatabaseError as error:
        lines = [str(error.orig)]
    for line in lines:
        if line != "ok":
            yield Problem("database", " ".join(line.split()), DAMAGE_REMEDY)


def _num(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
