"""A worker that logs when it is on its device."""

import os
import time
from pathlib import Path
from typing import Any

from trainhouse.workers.protocol.calls import OptimizerStep, Pass, RunInfo, RunSpec, SamplingSlice, SliceResult
from trainhouse.workers.worker.worker import Worker

MOVING = "trainhouse.tests.workers.moving_worker:MovingWorker"


class MovingWorker(Worker):
    """Logs each arrival and departure, a line each, to a file per process in its page_directory."""

    def offload(self) -> float:
        seconds = super().offload()
        self._note("left")
        return seconds

    def create_run(self, spec: RunSpec) -> RunInfo:
        self._note("arrived")
        return super().create_run(spec)

    def run_pass(self, parts: Pass) -> Any:
        self._note("arrived")
        return super().run_pass(parts)

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> Any:
        self._note("arrived")
        return super().apply_steps(steps)

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        self._note("arrived")
        return super().sample_slice(work)

    def _note(self, event: str) -> None:
        directory = self._config.page_directory
        assert directory is not None
        with (Path(directory) / f"{os.getpid()}.log").open("a") as log:
            log.write(f"{time.monotonic()} {event}\n")


def device_intervals(log: Path) -> list[tuple[float, float]]:
    """Returns the intervals in which the process was on its device."""
    found: list[tuple[float, float]] = []
    began = None
    for line in log.read_text().splitlines():
        at, event = line.split()
        if event == "arrived":
            began = began or float(at)
        elif began is not None:
            found.append((began, float(at)))
            began = None
    return found if began is None else [*found, (began, float("inf"))]
