"""Formats and sets up the log of every process: one line for each record, as text or as JSON.

Texts that users have chosen (paths, names, messages) are in lines too, so control characters are escaped and lengths
are bounded: no request can forge a line, move a terminal's cursor, or fill the disk with one.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .work_context import CURRENT_WORK

LogForm = Literal["text", "json"]

_MAX_MESSAGE, _MAX_FIELD, _MAX_TRACEBACK = 4000, 500, 20_000
"""Characters that are kept of a message, of another field, and of a traceback."""

# Control characters, line separators, marks that reverse the direction of text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = re.compile(r"[\w./:{}+-]+")
_FIELDS, _TRACEBACK = "fields", "remote_traceback"


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Logs an event with fields, of which those that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: fields}, stacklevel=2)


def log_remote_failure(logger: logging.Logger, message: str, traceback: str) -> None:
    """Logs an error with the traceback of another process, or of another thread."""
    logger.error("%s", message, extra={_TRACEBACK: traceback}, stacklevel=2)


@dataclass(frozen=True)
class LogSettings:
    """The log of a process. level: the lowest severity that is logged. form: of its lines."""

    level: int = logging.WARNING
    form: LogForm = "text"

    @classmethod
    def of_this_process(cls, logger: logging.Logger) -> "LogSettings":
        """Returns the settings that `install` made here, for the processes that this one starts."""
        formatters = (handler.formatter for handler in logging.getLogger().handlers)
        forms: list[LogForm] = [each.form for each in formatters if isinstance(each, LineFormatter)]
        return cls(logger.getEffectiveLevel(), forms[0] if forms else "text")

    def install(self, rank: int | None = None) -> None:
        """Logs to standard error; other packages than ours only warnings if this is a rank's process."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter(self.form, rank))
        if rank is None:
            logging.basicConfig(level=self.level, handlers=[handler], force=True)
        else:
            logging.basicConfig(handlers=[handler])
            logging.getLogger(__name__.partition(".")[0]).setLevel(self.level)


class LineFormatter(logging.Formatter):
    """Formats a record, with the ids of the work of the task that logs it, as one line; only tracebacks in text follow
    it, indented."""

    def __init__(self, form: LogForm, rank: int | None = None) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self.form: LogForm = form
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        message = _bounded(record.getMessage(), _MAX_MESSAGE)
        fields = {**getattr(record, _FIELDS, {}), **_ids()}
        shown = {name: value for name, value in fields.items() if value is not None}
        traceback = self._traceback(record)
        if self.form == "json":
            return self._json(record, message, shown, traceback)
        where = record.name if self._rank is None else f"rank {self._rank}, {record.name}"
        head = f"{self.formatTime(record, self.datefmt)} {record.levelname:7} {where}: {escaped(message)}"
        line = " ".join((head, *(f"{name}={_text(value)}" for name, value in shown.items())))
        if traceback is None:
            return line
        return "\n".join((line, *(f"  {escaped(part)}" for part in traceback.splitlines())))

    def _traceback(self, record: logging.LogRecord) -> str | None:
        info = record.exc_info
        text = getattr(record, _TRACEBACK, None) if info is None or info[0] is None else self.formatException(info)
        return text if text is None or len(text) <= _MAX_TRACEBACK else f"... {text[-_MAX_TRACEBACK:]}"

    def _json(
        self, record: logging.LogRecord, message: str, fields: Mapping[str, object], traceback: str | None
    ) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if self._rank is not None:
            line["rank"] = self._rank
        for name, value in fields.items():
            line[name] = _bounded(value, _MAX_FIELD) if isinstance(value, str) else value
        if traceback is not None:
            line["traceback"] = traceback
        return json.dumps(line, default=str)


def escaped(text: str) -> str:
    r"""Replaces characters that could begin a line or control a terminal by \n, \x1b, \u2028, ..."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _ids() -> dict[str, str | None]:
    work = CURRENT_WORK.get()
    if work is None:
        return {}
    return {"request": work.request, "tenant": work.tenant, "run": work.run, "trace": work.trace}


def _text(value: object) -> str:
    if not isinstance(value, str):
        return str(value)
    value = escaped(_bounded(value, _MAX_FIELD))
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
