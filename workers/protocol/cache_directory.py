"""The directory in which this user's processes cache what takes time to compute or fetch. Imports no torch."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Returns this user's cache directory, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainhouse"
