"""A training worker with empty adapters, each of which takes long to load."""

import time
from pathlib import Path

from trainhouse.tests.workers.recording_worker import RecordingWorker

LOADING_SECONDS = 2.0


class SlowLoader(RecordingWorker):
    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        Path(directory, "trainhouse.json").write_text("{}")

    def load_adapter(self, adapter_id: str, directory: str) -> None:
        time.sleep(LOADING_SECONDS)

    def drop_adapter(self, adapter_id: str) -> None:
        pass


SLOW_LOADER = f"{SlowLoader.__module__}:{SlowLoader.__name__}"
