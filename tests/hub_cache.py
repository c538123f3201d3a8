"""The hub's cache of a client's machine, written without a network."""

import shutil
from pathlib import Path


def add_to_hub_cache(home: Path, hub_id: str, model: Path, commit: str = "0" * 40) -> None:
    """Writes what HF_HOME holds once `hub_id` was loaded, the weights of `model` excepted."""
    root = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(model, root / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
