"""Sets up the logging of a server process."""

import logging

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Loggers whose INFO messages are noise; their warnings are kept.
_TALKATIVE = (
    *("uvicorn", "uvicorn.error", "asyncio", "filelock", "aiobotocore", "botocore"),
    *("httpx", "httpcore", "httpx2", "httpcore2"),
)


def configure_logging(level: str) -> None:
    """Logs to standard error, so that `serve` can print to its user on standard output."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
