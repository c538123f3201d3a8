"""Finds the files of base models on this machine, and refuses tokenizers among them that are programs."""

import hashlib
import os
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ..bounds import load_json


@dataclass(frozen=True)
class ModelFiles:
    """The absolute directory of a base model, and the SHA-256 of its config.json in hexadecimal."""

    directory: str
    config_sha256: str


def model_files(source: str) -> ModelFiles | None:
    """Returns where the files of `model_directory(source)` are, None if its config.json is not on this machine."""
    directory = model_directory(source)
    digest = None if directory is None else config_sha256(directory)
    return None if directory is None or digest is None else ModelFiles(str(directory.absolute()), digest)


def config_sha256(directory: Path) -> str | None:
    """Returns the SHA-256 of the directory's config.json in hexadecimal, None if it cannot be read."""
    try:
        return hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; False for every other host name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


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


def refuse_tokenizer_program(source: str) -> None:
    """Raises ValueError if only a program in the model's directory gives its tokens, as for Kimi-K2.

    Such programs are never run, and what transformers makes of their vocabulary splits texts at other places.
    """
    directory = Path(source)
    if (directory / "tokenizer.json").exists() or not (file := directory / "tokenizer_config.json").exists():
        return
    if program := (load_json(file.read_text()).get("auto_map") or {}).get("AutoTokenizer"):
        name = program if isinstance(program, str) else next((each for each in program if each), "unknown")
        raise ValueError(
            f"its tokenizer is a program ({name}), which is not run here: put a tokenizer.json of the tokenizers"
            " library next to it"
        )
