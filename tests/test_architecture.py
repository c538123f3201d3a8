"""The layout that DESIGN fixes: which package may import which, and that the explicit package list is the tree."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "examples", "schemas", "server", "workers")

# package -> the first-party packages that it may import
ARROWS = {
    "schemas": {"schemas"},
    "client": {"client", "schemas"},
    "workers": {"workers", "schemas"},
    "server": {"server", "schemas", "workers"},
}
# The parts of workers that a process without torch may import.
TORCH_FREE_WORKERS = {
    "aliases",
    "dispatch",
    "keeper",
    "messages",
    "pools",
    "sources",
    "verbs",
    "config",
    "devices",
    "footprint",
    "model_cache",
    "parallel",
}
TORCH_FREE_LAYOUTS = {
    "checks",
    "choice",
    "draft_spec",
    "estimate",
    "families",
    "learned",
    "load",
    "parameters",
    "sequence_split",
    "shape",
    "spec",
    "styles",
}

# Of workers, what is the same for every kind of model.
CORE = (
    *("batch", "holder", "layout", "learner", "moments", "objective", "operation", "optim", "residency", "scoring"),
    *("snapshot_writer", "worker"),
)


def sources(package: str) -> Iterator[Path]:
    return (path for path in (ROOT / package).rglob("*.py") if not path.name.endswith("_pb2.py"))


def first_party_imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Relative imports of a file as absolute dotted parts below the root package."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = tuple(node.module.split(".")) if node.module else ()
            if module or base:
                yield base + module
            yield from (base + module + (alias.name,) for alias in node.names)


@pytest.mark.parametrize("package", ARROWS)
def test_imports_follow_the_arrows(package: str) -> None:
    for path in sources(package):
        for target in first_party_imports(path):
            if target[0] in PACKAGES:
                assert target[0] in ARROWS[package], f"{path} imports {'.'.join(target)}"


def test_server_reaches_only_the_torch_free_part_of_workers() -> None:
    for path in sources("server"):
        for target in first_party_imports(path):
            if target[0] == "workers" and len(target) > 1:
                assert target[1] in TORCH_FREE_WORKERS, f"{path} imports {'.'.join(target)}"
                if target[1] == "parallel":
                    assert target[2] in TORCH_FREE_LAYOUTS, f"{path} imports {'.'.join(target)}"


def words(path: Path) -> Iterator[str]:
    """That a file's code consists of: names, attributes, modules, and strings that are a single word."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.Constant(value=str(word)):
                yield word
            case ast.alias(name=word):
                yield from word.split(".")
            case ast.ImportFrom(module=str(word)):
                yield from word.split(".")


def test_the_core_knows_no_kind_of_model_by_name() -> None:
    """What runs passes, takes steps, moves and saves: kinds differ by what their Program says."""
    kinds = {path.stem for path in (ROOT / "workers" / "programs").glob("*.py")} - {"__init__", "program"}
    assert {"policy", "critic", "eagle3"} <= kinds
    core = [ROOT / "workers" / f"{name}.py" for name in CORE]
    for path in [*core, *(ROOT / "workers" / "passes").glob("*.py")]:
        assert not kinds & {word.lower() for word in words(path)}, path
    assert kinds & {word.lower() for word in words(ROOT / "workers" / "heads" / "values.py")}, (
        "a head may, and is found"
    )


def test_ray_is_imported_by_the_pools_alone() -> None:
    for package in PACKAGES:
        for path in sources(package):
            imported = {
                alias.name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            assert "ray" not in imported or path.parent == ROOT / "workers" / "pools", path


@pytest.mark.parametrize(
    "module",
    ["trainhouse", "trainhouse.client", "trainhouse.server.cli", "trainhouse.server.app", "trainhouse.server.plan"],
)
def test_nothing_outside_the_workers_loads_torch_or_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_loads_the_application_to_serve_alone() -> None:
    code = "import sys, trainhouse.server.cli; print([name for name in sys.modules if name in sys.argv])"
    parts = ["uvicorn", "trainhouse.server.app", "trainhouse.server.process"]
    done = subprocess.run([sys.executable, "-c", code, *parts], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_needs_only_the_bare_install() -> None:
    """httpx, pydantic, numpy and protobuf: it works where nothing of the [server] extra can be imported."""
    extra = ["fastapi", "ray", "sqlalchemy", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "zstandard"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extra})); import trainhouse; trainhouse.ServiceClient"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)


def test_the_package_list_is_the_tree() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"trainhouse"} | {
        ".".join(("trainhouse", *path.parent.relative_to(ROOT).parts))
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found
