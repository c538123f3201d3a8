"""Prints the test files that compare sampled tokens: those that import drawn.py, directly or through other helpers.

`make test-processors` runs them as on other processors.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .unit import ROOT, imports, module_file, prefixes

DRAWN = "trainhouse.tests.drawn"


def drawn_test_files() -> Iterator[Path]:
    return filter(compares_tokens, sorted((ROOT / "tests").rglob("test_*.py")))


@cache
def compares_tokens(path: Path) -> bool:
    names = {prefix for name in imports(path) for prefix in prefixes(name)}
    helpers = (module_file(name) for name in names if name.startswith("trainhouse.tests."))
    return DRAWN in names or any(compares_tokens(each) for each in helpers if each not in (None, path))


def exact_comparisons(code: str) -> Iterator[int]:
    """Yields the lines that want the tokens of one sample to be those of another, not up to ties."""
    tree = ast.parse(code)
    negated = {node.operand for node in ast.walk(tree) if isinstance(node, ast.UnaryOp)}
    for node in ast.walk(tree):
        match node:
            case _ if node in negated:
                continue
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                pass
            case ast.Call(func=ast.Attribute(attr="assert_array_equal" | "array_equal"), args=[left, right]):
                pass
            case _:
                continue
        if _is_sample(left) and _is_sample(right):
            yield node.lineno


def _is_sample(node: ast.expr) -> bool:
    """True for X.tokens and X["tokens"], as they are, as lists and in part, also of each X."""
    match node:
        case ast.Attribute(attr="tokens") | ast.Subscript(slice=ast.Constant(value="tokens")):
            return True
        case (
            ast.Call(func=ast.Attribute(attr="tolist", value=inner))
            | ast.Subscript(value=inner)
            | ast.ListComp(elt=inner)
        ):
            return _is_sample(inner)
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]):
            return _is_sample(inner)
    return False


if __name__ == "__main__":
    for path in drawn_test_files():
        print(path.relative_to(ROOT))
