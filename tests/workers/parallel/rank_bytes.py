"""Live bytes of a rank."""

from collections.abc import Iterator
from contextlib import contextmanager

from .live_bytes import LiveBytes
from .probe_worker import ProbeWorker


class PassBytes:
    """Counts the live bytes of tensors that the last pass made."""

    def __init__(self, rank: ProbeWorker) -> None:
        self._live = LiveBytes()
        rank.surround("run_pass", self._counted)

    def peak(self) -> int:
        return self._live.peak

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with LiveBytes() as self._live:
            yield


class RunBytes:
    """Counts the live bytes that runs allocated in any call since the first one."""

    def __init__(self, rank: ProbeWorker) -> None:
        self._live = LiveBytes()
        for verb in ("create_run", "apply_steps"):
            rank.surround(verb, lambda: self._live)
        for verb in ("run_pass", "export_adapter"):
            rank.surround(verb, self._restarted)

    def alive(self) -> int:
        return self._live.count()

    def peak(self) -> int:
        """Returns the peak of the last pass or export."""
        return self._live.peak

    def _restarted(self) -> LiveBytes:
        self._live.restart()
        return self._live
