"""`python -m` this: the server as it is, but for that nothing of what it accepts and answers reaches the disk."""

import asyncio
from collections.abc import Mapping

from trainhouse.server.__main__ import main
from trainhouse.server.files.wal import Place, Segments
from trainhouse.server.runs.snapshotting import RunState


def _append(self: Segments, header: Mapping[str, object], body: bytes = b"") -> "asyncio.Future[Place]":
    done: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
    done.set_result(Place(0, 0))
    return done


if __name__ == "__main__":
    Segments.append = _append
    Segments.delete = lambda self, segment: None
    RunState.snapshot_if_due = lambda *_, **__: None
    main()
