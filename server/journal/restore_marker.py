"""Copied: the mark of a copy of live state, by which a server that starts on it knows that clients may be ahead of it.

`backup` leaves it in the copy. From a server's first start there it names the runs that have not gone on since; one of
them whose next operation does not come, but later ones do, has lost what came behind the copy.
"""

import json
import logging
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = "copied.json"


@dataclass(frozen=True)
class _Mark:
    """at: when it was copied, in s since 1970. waiting: runs that have not gone on since; None: nobody has looked.

    behind: runs whose clients are known to be ahead.
    """

    at: float
    waiting: list[str] | None = None
    behind: list[str] = field(default_factory=list)


def mark_copy(live: Path, copy: Path, at: float) -> None:
    """live, copy: directories of live state. What a copy of a copy has lost stays so."""
    mark = _read(live)
    _write(copy, _Mark(at, behind=[] if mark is None else mark.behind))


class Copied:
    """Of the server that works in this directory of live state. Without a mark there all runs are whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = _read(directory)

    def begin(self, run_ids: Collection[str]) -> None:
        """run_ids: of all runs that there are at this start."""
        if (mark := self._mark) is None:
            return
        waiting = run_ids if mark.waiting is None else mark.waiting
        self._change(
            replace(
                mark,
                waiting=sorted({*waiting}.intersection(run_ids)),
                behind=sorted({*mark.behind}.intersection(run_ids)),
            )
        )

    def is_waiting(self, run_id: str) -> bool:
        """It has not gone on since it was copied."""
        return self._mark is not None and (self._mark.waiting is None or run_id in self._mark.waiting)

    def is_behind(self, run_id: str) -> bool:
        return self._mark is not None and run_id in self._mark.behind

    def goes_on(self, run_id: str) -> None:
        """What followed has come, or the run is over."""
        if (mark := self._mark) is not None and (self.is_waiting(run_id) or self.is_behind(run_id)):
            self._change(_without(run_id, mark))

    def found_behind(self, run_id: str) -> None:
        """Its client is ahead of it, for good."""
        if (mark := self._mark) is not None:
            self._change(replace(_without(run_id, mark), behind=sorted({*mark.behind, run_id})))

    @property
    def when(self) -> str:
        return "" if self._mark is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._mark.at))

    def _change(self, mark: _Mark) -> None:
        """A full disk is no reason to stop: at the next start the run is judged again, and as strictly."""
        self._mark = mark
        try:
            if mark.waiting or mark.behind:
                _write(self._directory, mark)
            else:
                (self._directory / _NAME).unlink(missing_ok=True)
                self._mark = None
        except OSError as error:
            logger.error("%s cannot be written: %s", self._directory / _NAME, error)


def _without(run_id: str, mark: _Mark) -> _Mark:
    others = ([one for one in several or () if one != run_id] for several in (mark.waiting, mark.behind))
    return _Mark(mark.at, *others)


def _read(directory: Path) -> _Mark | None:
    path = directory / _NAME
    try:
        return _Mark(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.error("%s is damaged (%s): no run is taken to have gone on since", path, error)
        return _Mark(path.stat().st_mtime)


def _write(directory: Path, mark: _Mark) -> None:
    aside = directory / f".{_NAME}"
    aside.write_text(json.dumps(asdict(mark)))
    aside.replace(directory / _NAME)
