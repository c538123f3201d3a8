"""Tests replace no private function, method or attribute. They may shorten a module's private constants."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PATCHES = {"setattr", "delattr", "patch", "object"}
# A preempted sequence may be admitted again within the same call of a public method, so only this one shows it. The
# others are vLLM's, whose public functions do not lead to them.
ALLOWED = {
    "monkeypatch.setattr(SequenceScheduler, '_preempt_youngest', preempt)",
    "CPURouter._compute_routing",
    "registry._run_in_subprocess",
    "reader._config",
}


def private_patches(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if is_private(name):
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in PATCHES:
                dotted = [each.value for each in args[:2] if isinstance(each, ast.Constant)]
                if any(is_private(part) for each in dotted for part in str(each).split(".")):
                    yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.isupper()


@pytest.mark.slow
def test_nothing_private_is_patched() -> None:
    assert {patch for path in TESTS.rglob("*.py") for patch in private_patches(path.read_text())} == ALLOWED


@pytest.mark.parametrize(
    "patch",
    [
        'monkeypatch.setattr(Run, "_begin", None)',
        'monkeypatch.setattr("trainhouse.server.runs.run._begin", None)',
        'mock.patch("trainhouse.server.runs._run.begin")',
        'mock.patch.object(run, "_begin")',
        'setattr(run, "_begin", None)',
        "server.runs.run._begin = None",
        "run._num_begun += 1",
        "del run._begin",
    ],
)
def test_a_private_patch_is_found(patch: str) -> None:
    assert len(list(private_patches(patch))) == 1


@pytest.mark.parametrize(
    "allowed",
    [
        'monkeypatch.setattr(Run, "begin", None)',
        'monkeypatch.setattr(runs, "_RETRY_SECONDS", 0.1)',
        "self._num_begun += 1",
        "run.begin = None",
        "assert run._begun",
    ],
)
def test_other_code_is_allowed(allowed: str) -> None:
    assert not list(private_patches(allowed))
