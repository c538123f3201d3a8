"""Where the log lines of a server process go, and whose are worth reading."""

import logging

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Their warnings are for us to read, their information is not.
_TALKATIVE = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio", "filelock", "aiobotocore", "botocore")


def configure_logging(level: str) -> None:
    """To standard error, so that what `serve` prints for its user stays readable on standard output."""
    logging.basicConfig(level=level.upper(), format=_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
