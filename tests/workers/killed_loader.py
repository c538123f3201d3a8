"""A worker that is killed while it loads, and one over which the forkserver is, as often as there are files for it."""

import os
import signal
from pathlib import Path

from trainhouse.tests.workers.recording_worker import RecordingWorker
from trainhouse.workers.protocol.config import WorkerConfig

KILLS = "TRAINHOUSE_TEST_KILLS"
"""Names a directory: each file in it that begins with "import" or "load" is removed by one death at that place."""


def _die_of(place: str) -> None:
    for path in sorted(Path(os.environ.get(KILLS, os.devnull)).glob(f"{place}*")):
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


# The forkserver imports the module, and its children have it then.
_die_of("import")


class KilledLoader(RecordingWorker):
    def __init__(self, config: WorkerConfig) -> None:
        _die_of("load")
        super().__init__(config)


KILLED_LOADER = f"{KilledLoader.__module__}:{KilledLoader.__name__}"
