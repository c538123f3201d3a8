"""The commands of docs/guides/cookbook.md are those of the installed tinker-cookbook, and the tests here run them."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...docs.blocks import ROOT
from .page import COMMANDS, PAGE, Command

found = importlib.util.find_spec("tinker_cookbook")
if not found or not found.origin:
    pytest.skip("make setup installs tinker-cookbook", allow_module_level=True)
COOKBOOK = Path(found.origin).parent
CONFIGS = ("supervised/train.py", "rl/train.py", "eval/inspect_evaluators.py")
"""Files with the options of programs that have no class of their own for them."""


def options(module: Path) -> Iterator[str]:
    for path in (module, *(COOKBOOK / name for name in CONFIGS)):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef):
                fields = (field.target for field in each.body if isinstance(field, ast.AnnAssign))
                yield from (field.id for field in fields if isinstance(field, ast.Name))


def check(command: Command) -> None:
    """Raises an error if the cookbook has no such module, or the module no such option."""
    module = COOKBOOK.parent.joinpath(*command.module.split(".")).with_suffix(".py")
    known = set(options(module))
    unknown = {name.partition(".")[0] for name in command.options} - known
    assert not unknown, f"{command.module} has no {unknown}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.options.get("log_path", command.module))
def test_a_command_and_its_options_exist(command: Command) -> None:
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        Command("tinker_cookbook.recipes.math_rl.train", {"enviroment": "arithmetic"}),
        Command("tinker_cookbook.recipes.math", {}),
    ],
)
def test_a_wrong_command_is_found(command: Command) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        check(command)


def test_every_module_of_the_page_is_run() -> None:
    files = ("conftest.py", "test_recipes.py", "test_evals.py")
    tests = "".join(Path(__file__).with_name(name).read_text() for name in files)
    modules = {command.module for command in COMMANDS}
    left = {
        module
        for module in modules
        if f'"{module}"' not in tests and f'"{module.removeprefix("tinker_cookbook.recipes.")}"' not in tests
    }
    assert modules and not left


def test_the_page_installs_what_the_makefile_does() -> None:
    def installed(text: str) -> list[list[str]]:
        lines = text.replace("\\\n", " ").splitlines()
        words = [line.partition("pip install")[2].split() for line in lines if "pip install" in line]
        return [[word for word in each if not word.startswith("-")] for each in words]

    recipe = (ROOT / "Makefile").read_text().partition("$(COOKBOOK)/.ready: $(READY)\n")[2].partition("\n\n")[0]
    made = [each[each.index("blobfile") :] if "blobfile" in each else each for each in installed(recipe)]
    assert installed(PAGE.read_text())[:3] == made and len(made) == 3
