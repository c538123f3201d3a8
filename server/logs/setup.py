"""Sets up the logging of a server process."""

import logging
import sys
from typing import Literal

from ...workers.protocol.log_lines import LogSettings

# Loggers whose INFO messages are noise; their warnings are kept.
_TALKATIVE = (
    *("uvicorn", "uvicorn.error", "asyncio", "filelock", "aiobotocore", "botocore", "opentelemetry", "urllib3"),
    *("httpx", "httpcore", "httpx2", "httpcore2"),
)


def configure_logging(level: str, form: Literal["auto", "text", "json"] = "auto") -> None:
    """Logs to standard error, so that `serve` can print to its user on standard output.

    Args:
        form: of the lines; auto is text on a terminal, and JSON elsewhere.
    """
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    LogSettings(logging.getLevelNamesMapping()[level.upper()], form).install()
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
