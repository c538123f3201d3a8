"""Prints the test files of `make check`: those that start no process and no server.

Such a file imports, directly or through other modules of tests, nothing of STARTERS, and uses none of the FIXTURES that
start something. Files found so need no list and no mark: a test that starts a process belongs into another file.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARTERS = {
    *("subprocess", "multiprocessing", "ray", "uvicorn", "trainhouse.tests.live", "trainhouse.tests.server.s3"),
    *("trainhouse.workers.dispatch.WorkerDispatch", "trainhouse.workers.engines"),
    *(f"trainhouse.workers.pools.{name}" for name in ("children", "local", "ray", "remote")),
}
# Helpers that never start the dispatch that they make.
HARMLESS = {"trainhouse.tests.server.api"}
FIXTURES = {"dispatch", "server", "limited", "s3", "postgres", "postgres_url", "shared_server", "vllm_python"}


def unit_test_files() -> Iterator[Path]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not starts_something(path) and not arguments(path) & FIXTURES:
            yield path


@cache
def starts_something(path: Path) -> bool:
    names = {prefix for name in imports(path) for prefix in prefixes(name)}
    helpers = (module_file(name) for name in names - HARMLESS if name.startswith("trainhouse.tests."))
    return bool(names & STARTERS) or any(starts_something(each) for each in helpers if each not in (None, path))


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


def arguments(path: Path) -> set[str]:
    """Returns the names of all parameters of the file's functions; those of tests are fixtures."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {argument.arg for function in functions for argument in function.args.args}


if __name__ == "__main__":
    for path in unit_test_files():
        print(path.relative_to(ROOT))
