"""Looks at the machine: installed packages, devices, the port, the disks, and the configuration of a server."""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Literal

from .... import __version__
from ....workers.resources.machine import cache_directory
from ...config.load import load_config, load_section
from ...config.option_values import ConfigError
from ...config.server_config import OPTIONS
from ...store import StoreConfig
from ..server_flags import Sources

_NEEDED = ("torch", "transformers", "ray", "fastapi", "uvicorn", "sqlalchemy", "safetensors")
_OPTIONAL: Mapping[str, str] = {
    "psycopg": "for --database-url: the extra postgres",
    "s3fs": "for checkpoints at s3://: the extra s3",
    "bitsandbytes": "for --base-quantization: the extra quantization",
    "flash-linear-attention": "for Qwen3.5 on a GPU: the extra gpu",
}
_OPEN_FILES = 4096
_LEAST_FREE_BYTES = 10 * 10**9
_SLOW_SYNC_SECONDS = 0.02
_SYNCS = 20
_DEVICES = """
import json, torch
names = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
found = [(torch.cuda.get_device_name(each), *torch.cuda.mem_get_info(each)) for each in names]
print(json.dumps({"cuda": torch.version.cuda, "devices": found, "threads": torch.get_num_threads()}))
"""
"""Printed by a process of its own: this one never loads torch."""


@dataclass(frozen=True)
class Finding:
    """One thing that `trainhouse doctor` looked at. status: "problem" for what a server cannot do without."""

    topic: str
    name: str
    value: str
    status: Literal["ok", "note", "problem"] = "ok"
    remedy: str = ""


def installed() -> Iterator[Finding]:
    python = f"{platform.python_version()} on {platform.machine()}"
    yield Finding("installed", "trainhouse", f"{__version__}, Python {python}")
    for name in _NEEDED:
        yield _package(name) or Finding("installed", name, "missing", "problem", "pip install 'trainhouse[server]'")
    for name, use in _OPTIONAL.items():
        yield _package(name) or Finding("installed", name, "missing", "note", use)
    if compiler := next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None):
        yield Finding("installed", "C compiler", compiler)
    else:
        yield Finding("installed", "C compiler", "missing", "note", "install gcc: kernels for CPUs are built with it")


def _package(name: str) -> Finding | None:
    with suppress(metadata.PackageNotFoundError):
        return Finding("installed", name, metadata.version(name))
    return None


def devices() -> Iterator[Finding]:
    """Yields cores, memory, and the GPUs that torch can use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("devices", "CPU", f"{len(os.sched_getaffinity(0))} cores, {_gigabytes(memory)} of memory")
    done = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        yield Finding("devices", "torch", reason, "problem", "pip install torch for this machine: docs/install.md")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    for number, (name, free, total) in enumerate(found["devices"]):
        yield Finding("devices", f"cuda:{number}", f"{name}, {_gigabytes(free)} of {_gigabytes(total)} free")
    if not found["devices"] and any(Path("/dev").glob("nvidia[0-9]*")):
        remedy = "install torch with CUDA: docs/install.md" if found["cuda"] is None else "see what nvidia-smi reports"
        yield Finding("devices", "CUDA", "there is a GPU, which torch cannot use", "problem", remedy)
    elif not found["devices"]:
        yield Finding("devices", "CUDA", "no GPU: models run on the CPU", "note")


def port(host: str, number: int) -> Finding:
    """Reports whether a server could listen, or already does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
        except OSError as error:
            if _answers(host, number):
                return Finding("port", f"{host}:{number}", "a trainhouse server answers")
            return Finding("port", f"{host}:{number}", str(error.strerror), "problem", "serve with another --port")
    return Finding("port", f"{host}:{number}", "free")


def _answers(host: str, number: int) -> bool:
    shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    try:
        with urllib.request.urlopen(f"http://{shown}:{number}/api/v1/healthz", timeout=2) as answer:
            return json.load(answer).get("status") == "ok"
    except (OSError, ValueError, HTTPException):  # the last if what answers does not speak HTTP
        return False


def limits() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        remedy = f"raise the hard limit to {_OPEN_FILES}: ulimit -Hn"
        return Finding("limits", "open files", str(hard), "problem", remedy)
    return Finding("limits", "open files", "unlimited" if hard == resource.RLIM_INFINITY else str(hard))


def disks(state_dir: Path) -> Iterator[Finding]:
    """Yields the free space of the disks that a server writes, and how long a durable write to the first takes."""
    for name, directory in (("state directory", state_dir), ("cache of models", cache_directory())):
        place = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir())
        free = shutil.disk_usage(place).free
        is_full = free < _LEAST_FREE_BYTES
        remedy = "free some: checkpoints and models take gigabytes" if is_full else ""
        value = f"{_gigabytes(free)} free at {directory}"
        yield Finding("disk", name, value, "note" if is_full else "ok", remedy)
        if name == "state directory":
            yield _writing(place)


def _writing(place: Path) -> Finding:
    """Measures a durable write. With `--durability power`, accepted operations wait for one."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            began = time.perf_counter()
            for _ in range(_SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            seconds = (time.perf_counter() - began) / _SYNCS
    except OSError as error:
        return Finding("disk", "writing", f"{place}: {error.strerror}", "problem", "choose a writable --state-dir")
    remedy = "a local disk answers sooner: docs/durability.md" if seconds > _SLOW_SYNC_SECONDS else ""
    return Finding("disk", "durable write", f"{seconds * 1e3:.2f} ms", "note" if remedy else "ok", remedy)


def configuration(sources: Sources) -> Finding:
    """Reports whether `serve` would accept the flags, the environment and the file."""
    flags, environment, file = sources
    given = [name for name in OPTIONS if f"TRAINHOUSE_{name.upper()}" in environment]
    value = ", ".join([*([str(file)] if file else []), *(f"TRAINHOUSE_{name.upper()}" for name in given)]) or "defaults"
    try:
        load_section(StoreConfig, *sources)
        if file is not None or "base_models" in given:
            load_config(flags, environment, file)
    except ConfigError as error:
        return Finding("configuration", "serve", value, "problem", str(error))
    return Finding("configuration", "serve", value)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
