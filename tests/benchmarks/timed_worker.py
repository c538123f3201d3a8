"""A worker that can say how long a pass takes it: the model's own time, in the process that serves it."""

import time

from trainhouse.workers.protocol.verbs import Pass
from trainhouse.workers.worker.worker import Worker

TIMED = f"{__name__}:TimedWorker"


class TimedWorker(Worker):
    def time_passes(self, work: Pass, num_passes: int, pause_seconds: float) -> list[float]:
        """Seconds of each; `pause_seconds` between them, in which others may have the caches."""
        times = []
        for _ in range(num_passes):
            time.sleep(pause_seconds)
            started = time.perf_counter()
            self.run_pass(work)
            times.append(time.perf_counter() - started)
        return times
