"""Finds the files of base models on this machine."""

import os
from pathlib import Path


def model_directory(source: str) -> Path | None:
    """Returns the directory with the model's files, None if they are not on this machine.

    Args:
        source: a directory, or a name in the Hugging Face cache.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") > 1 or source.startswith(("/", ".")):
        return None
    # The layout of huggingface_hub, whose import would take half a second.
    repository = hub_cache() / ("models--" + source.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    directory = repository / "snapshots" / revision
    return directory if (directory / "config.json").exists() else None


def hub_cache() -> Path:
    """Returns the directory of the Hugging Face cache, as huggingface_hub decides it."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.environ.get("HF_HUB_CACHE", cache))).expanduser()
