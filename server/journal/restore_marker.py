"""Restore marker: a file by which a server that starts on a backup knows that clients may be ahead of its runs.

`backup` writes it into the copy. From a server's first start on the copy, it lists the runs that have not continued
since. If such a run's next operation never arrives, but later ones do, the run has lost the operations after the copy.
"""

import json
import logging
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...schemas.bounds import load_json
from ..files.directories import read_regular

logger = logging.getLogger(__name__)

_NAME = "copied.json"


@dataclass(frozen=True)
class _MarkerContent:
    """The content of the marker file.

    at: time of the copy, in seconds since 1970. waiting: runs that have not continued since; None: not determined yet.
    behind: runs whose clients are known to be ahead.
    """

    at: float
    waiting: list[str] | None = None
    behind: list[str] = field(default_factory=list)


def mark_copy(live: Path, copy: Path, at: float) -> None:
    """Writes the marker into `copy`, a copy of the live state in `live`.

    Runs that are behind in a marker of `live` stay so in the copy.
    """
    mark = _read(live)
    _write(copy, _MarkerContent(at, behind=[] if mark is None else mark.behind))


class RestoreMarker:
    """The restore marker of this server's live state. Without a marker file, no run is waiting or behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = _read(directory)

    def begin(self, run_ids: Collection[str]) -> None:
        """Limits the marker to the runs that exist at this start; at the first start on a copy, all of them are
        waiting.
        """
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
        """True if the run has not continued since the copy."""
        return self._mark is not None and (self._mark.waiting is None or run_id in self._mark.waiting)

    def is_behind(self, run_id: str) -> bool:
        return self._mark is not None and run_id in self._mark.behind

    def mark_continued(self, run_id: str) -> None:
        """Removes the run from the marker: its next operation has arrived, or the run is over."""
        if (mark := self._mark) is not None and (self.is_waiting(run_id) or self.is_behind(run_id)):
            self._change(_without(run_id, mark))

    def mark_behind(self, run_id: str) -> None:
        """Records that the client is ahead of the run, which is permanent."""
        if (mark := self._mark) is not None:
            self._change(replace(_without(run_id, mark), behind=sorted({*mark.behind, run_id})))

    @property
    def copied_at(self) -> str:
        """Returns the time of the copy as text, or "" without a marker."""
        return "" if self._mark is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._mark.at))

    def _change(self, mark: _MarkerContent) -> None:
        """Replaces the marker. A write error is only logged: at the next start the run is judged again, as strictly."""
        self._mark = mark
        try:
            if mark.waiting or mark.behind:
                _write(self._directory, mark)
            else:
                (self._directory / _NAME).unlink(missing_ok=True)
                self._mark = None
        except OSError as error:
            logger.error("%s cannot be written: %s", self._directory / _NAME, error)


def _without(run_id: str, mark: _MarkerContent) -> _MarkerContent:
    others = ([one for one in several or () if one != run_id] for several in (mark.waiting, mark.behind))
    return _MarkerContent(mark.at, *others)


def _read(directory: Path) -> _MarkerContent | None:
    path = directory / _NAME
    try:
        return _MarkerContent(**load_json(read_regular(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.error("%s is damaged (%s): assuming that no run has continued since the copy", path, error)
        return _MarkerContent(path.stat().st_mtime)


def _write(directory: Path, mark: _MarkerContent) -> None:
    aside = directory / f".{_NAME}"
    aside.write_text(json.dumps(asdict(mark)))
    aside.replace(directory / _NAME)
