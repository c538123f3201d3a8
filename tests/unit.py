"""Prints the test files of `make check`: those that start no process and no server, and build no model.

Such a file imports, directly or through other modules of tests, nothing of HEAVY, and uses none of the FIXTURES that
start or build something. So there is no list to maintain and no mark to set.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    *("subprocess", "multiprocessing", "ray", "uvicorn", "trainhouse.tests.live", "trainhouse.tests.server.s3"),
    *("trainhouse.workers.dispatch.WorkerDispatch", "trainhouse.workers.engines"),
    *(f"trainhouse.workers.pools.{name}" for name in ("children", "local", "ray")),
    *("transformers", "trainhouse.tests.tiny", "trainhouse.workers.models.model", "trainhouse.workers.worker.worker"),
}
# Helpers that never start the dispatch that they make.
HARMLESS = {"trainhouse.tests.server.api"}
FIXTURES = {
    *("dispatch", "server", "limited", "s3", "postgres", "postgres_url", "shared_server", "vllm_python"),
    *("tiny_models", "model", "worker"),
}


def unit_test_files() -> Iterator[Path]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not is_heavy(path) and FIXTURES.isdisjoint(fixtures(path)):
            yield path


@cache
def is_heavy(path: Path) -> bool:
    names = {prefix for name in imports(path) for prefix in prefixes(name)}
    helpers = (module_file(name) for name in names - HARMLESS if name.startswith("trainhouse.tests."))
    return bool(names & HEAVY) or any(is_heavy(each) for each in helpers if each not in (None, path))


def imports(path: Path) -> Iterator[str]:
    """Yields absolute dotted names of imported modules, and of what is imported from them."""
    package = ("trainhouse", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) + 1 - node.level]] if node.level else []
            parts += node.module.split(".") if node.module else []
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return path if path.is_file() else None


def fixtures(path: Path) -> Iterator[str]:
    """Yields the names of all parameters of the file's functions, and of fixtures that they ask for by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from (argument.arg for argument in node.args.args)
            case ast.Call(func=ast.Attribute(attr="getfixturevalue"), args=[ast.Constant(value=str(name))]):
                yield name


if __name__ == "__main__":
    for path in unit_test_files():
        print(path.relative_to(ROOT))
