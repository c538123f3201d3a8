"""The data of evaluations, stored so that clients send it once.

Layout below state_dir/evaluations: RUN/SEQ_ID of the operation that created the evaluation, with its data in pieces,
each a forward request in protobuf; and .staging-* while they are written.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

from ...schemas.batches import split_into_chunks
from ...schemas.codec import PROTOBUF, decode_forward_backward, encode_forward_backward_request
from ...schemas.errors import OperationError
from ...schemas.models import Limit
from ...schemas.training import Datum, ForwardBackwardRequest
from ..files.directories import directory_name, move_into_place, read_regular, remove_tree, staging_path, sweep_runs
from ..files.manifest import check_file, listed_files, read_manifest, write_manifest
from ..store import RunRecord

_PIECE_DATUMS, _PIECE_BYTES = 256, 4 << 20
"""The largest piece: what an evaluation holds in memory, and for how long it may keep other passes waiting."""


class EvaluationData:
    """Stores and reads the data of all runs' evaluations.

    sync: whether they must survive a machine crash. tenant_bytes: the most that those of a tenant may have.
    """

    def __init__(self, root: Path, sync: bool, tenant_bytes: int) -> None:
        self._root = root.absolute()
        self._sync = sync
        self._tenant_bytes = tenant_bytes
        self._of_runs: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by tenant, then by run

    def limit(self, tenant_id: str) -> Limit:
        return Limit(limit=self._tenant_bytes, used=sum(self._of_runs[tenant_id].values()))

    def count(self, run: RunRecord, num_bytes: int) -> None:
        """Counts so many bytes for the run, instead of those counted before."""
        self._of_runs[run.tenant_id][run.run_id] = num_bytes

    def reserve(self, run: RunRecord, num_bytes: int) -> None:
        """Like `count`, but raises OperationError if the tenant would exceed its limit."""
        others = self.limit(run.tenant_id).used - self._of_runs[run.tenant_id].get(run.run_id, 0)
        if others + num_bytes > self._tenant_bytes:
            raise OperationError(
                f"the data of your evaluations would have {others + num_bytes:.0f} bytes, and the limit is"
                f" {self._tenant_bytes} (the server's --tenant-evaluation-bytes): delete_evaluation, or send less"
            )
        self.count(run, num_bytes)

    async def store(self, run_id: str, seq_id: int, request: ForwardBackwardRequest) -> None:
        """Stores the data of the request, replacing what was stored for this operation. Raises OSError."""
        await asyncio.to_thread(self._store, self._directory(run_id, seq_id), request)

    async def read(self, run_id: str, seq_id: int) -> AsyncIterator[ForwardBackwardRequest]:
        """Yields forward requests for the pieces of the data. Raises OSError, ValueError if they are damaged."""
        directory = self._directory(run_id, seq_id)
        for name in await asyncio.to_thread(listed_files, directory):
            yield await asyncio.to_thread(_read, directory, name)

    async def remove(self, run_id: str, seq_id: int) -> None:
        await asyncio.to_thread(remove_tree, self._directory(run_id, seq_id), ignore_errors=True)

    async def end_run(self, run: RunRecord) -> None:
        self._of_runs[run.tenant_id].pop(run.run_id, None)
        await asyncio.to_thread(remove_tree, self._root / directory_name(run.run_id), ignore_errors=True)

    def sweep(self, live: Collection[str]) -> None:
        """Deletes unfinished directories, and those of runs that are not live. Blocking; for server start."""
        sweep_runs(self._root, live)

    def _directory(self, run_id: str, seq_id: int) -> Path:
        return self._root / directory_name(run_id) / str(seq_id)

    def _store(self, directory: Path, request: ForwardBackwardRequest) -> None:
        staging = staging_path(directory.parent)
        staging.mkdir(parents=True)
        try:
            for number, data in enumerate(pieces_of(request)):
                (staging / f"{number:04d}").write_bytes(encode_forward_backward_request(data))
            write_manifest(staging, {}, sync=self._sync)
            remove_tree(directory, ignore_errors=True)
            move_into_place(staging, directory, root=self._root.parent if self._sync else None)
        finally:
            remove_tree(staging, ignore_errors=True)


def pieces_of(request: ForwardBackwardRequest) -> list[ForwardBackwardRequest]:
    """Returns forward requests for consecutive pieces of the data, without their provenance."""
    pass_only = replace(request, evaluation=None, forward_only=True)
    data = [Datum(datum.tokens, datum.loss_fn_inputs) for datum in request.data]
    return [replace(pass_only, data=piece) for piece in split_into_chunks(data, _PIECE_DATUMS, _PIECE_BYTES)]


def _read(directory: Path, name: str) -> ForwardBackwardRequest:
    check_file(directory / name, read_manifest(directory)["files"][name])
    return decode_forward_backward(read_regular(directory / name), PROTOBUF, forward_only=True, was_accepted=True)
