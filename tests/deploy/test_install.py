"""deploy/install.sh takes the build of torch for CPUs from its index where that is reached, and else asks pip alone."""

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .tools import DEPLOY

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """\
import shutil
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return shutil.copy("trainhouse-1-py3-none-any.whl", wheel_directory).rpartition("/")[2]
"""


def write_wheel(directory: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Writes a wheel without files of its own, and what an index says of it."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{version}".replace("-", "_", name.count("-"))
    wheel = directory / f"{stem}-py3-none-any.whl"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    with (directory / "index.html").open("a") as index:
        index.write(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>\n')


def test_make_alone_installs_nothing_and_lists_the_targets() -> None:
    listed = subprocess.run(["make", "--directory", DEPLOY.parent], capture_output=True, text=True, check=True).stdout
    assert "make demo" in listed and "make check" in listed
    for arguments, installs in ((), False), (("check", "--assume-new=pyproject.toml"), True):
        command = ["make", "--dry-run", "--directory", DEPLOY.parent, *arguments]
        planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert ("deploy/install.sh" in planned) == installs


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """Yields the URL of a server with PyPI's torch, which brings CUDA, in pypi/, and torch's for CPUs in cpu/."""
    write_wheel(tmp_path / "www/pypi/torch", "torch", "2.13.0", ["nvidia-cublas"])
    write_wheel(tmp_path / "www/pypi/nvidia-cublas", "nvidia-cublas", "13.0")
    write_wheel(tmp_path / "www/cpu/torch", "torch", "2.13.0+cpu")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "www")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def install(tmp_path: Path, index: str, **environment: str) -> tuple[set[str], str]:
    """Runs it in a checkout that requires only torch. Returns the installed packages with releases, and the output."""
    checkout = tmp_path / "checkout"
    (checkout / "deploy").mkdir(parents=True)
    for name in ("install.sh", "torch-index.sh", "constraints.txt", "requirements.lock"):
        shutil.copy(DEPLOY / name, checkout / "deploy")
    write_wheel(checkout, "trainhouse", "1", ["torch"])
    (checkout / "pyproject.toml").write_text(PROJECT)
    (checkout / "backend.py").write_text(BACKEND)
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable, "TORCH_INDEX": index}
    done = subprocess.run(
        [checkout / "deploy" / "install.sh", tmp_path / "env"],
        env=variables | {"PIP_CONFIG_FILE": os.devnull} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = (tmp_path / "env").glob("lib/python*/site-packages/*.dist-info")
    names = {path.stem for path in found if path.stem.partition("-")[0] not in ("pip", "setuptools")}
    return names - {"trainhouse-1"}, done.stdout + done.stderr


@pytest.mark.slow
def test_torch_comes_without_cuda_where_its_index_is_reached(indexes: str, tmp_path: Path) -> None:
    found, said = install(tmp_path, f"{indexes}/cpu", PIP_INDEX_URL=f"{indexes}/pypi")
    assert found == {"torch-2.13.0+cpu"}
    assert f"{tmp_path / 'env'}: trainhouse, " in said and "packages, " in said and " MB, in " in said


@pytest.mark.slow
def test_pips_configuration_decides_where_the_index_is_not_reached(indexes: str, tmp_path: Path) -> None:
    found, said = install(
        tmp_path, "http://127.0.0.1:9", PIP_INDEX_URL=f"{indexes}/pypi", PIP_EXTRA_INDEX_URL=f"{indexes}/cpu"
    )
    assert found == {"torch-2.13.0+cpu"} and "http://127.0.0.1:9 is not reached" in said


@pytest.mark.slow
def test_other_constraints_take_the_build_for_cuda(indexes: str, tmp_path: Path) -> None:
    options = {"PIP_INDEX_URL": f"{indexes}/pypi", "TORCH_CONSTRAINTS": os.devnull}
    found, _ = install(tmp_path, f"{indexes}/cpu", **options)
    assert found == {"torch-2.13.0", "nvidia_cublas-13.0"}
