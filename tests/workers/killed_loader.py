"""A worker that is killed on import, which takes the forkserver with it, or on load."""

import os
import signal
from pathlib import Path

from trainhouse.tests.workers.recording_worker import RecordingWorker
from trainhouse.workers.protocol.worker_config import WorkerConfig

KILLS = "TRAINHOUSE_TEST_KILLS"
"""Names a directory: each file in it whose name begins with "import" or "load" causes one death and is removed."""


def _die_at(place: str) -> None:
    for path in sorted(Path(os.environ.get(KILLS, os.devnull)).glob(f"{place}*")):
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


# The forkserver imports the module, and its children inherit it.
_die_at("import")


class KilledLoader(RecordingWorker):
    def __init__(self, config: WorkerConfig) -> None:
        _die_at("load")
        super().__init__(config)


KILLED_LOADER = f"{KilledLoader.__module__}:{KilledLoader.__name__}"
