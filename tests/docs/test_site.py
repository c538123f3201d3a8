"""The site is built without a warning and loads nothing from elsewhere; its reference has all that the code has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trainhouse
from trainhouse.server.cli.commands import COMMANDS
from trainhouse.server.config.server_config import OPTIONS

from .blocks import ROOT

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//""")


MAX_LINE = 120


def long_lines(text: str) -> list[int]:
    """Returns the numbers of prose lines that are too long: code, rows of tables and addresses of links may be."""
    code, found = False, []
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if len(line) > MAX_LINE and not code and not re.match(r"\s*(\||\[[^]]+\]: )", line):
            found.append(number)
    return found


def test_lines_of_prose_fit_into_a_terminal() -> None:
    """Except for docs/models.md, which `make models` writes."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)): long_lines(page.read_text()) for page in pages if page.name != "models.md"}
    assert not {page: lines for page, lines in found.items() if lines}
    long = "a" * (MAX_LINE + 1)
    assert long_lines(f"{long}\n```\n{long}\n```\n| {long}\n[a]: {long}\n- {long}\n{long[1:]}") == [1, 7]


def build(site: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(site, ROOT / "deploy" / "site" / "mkdocs.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_every_page_is_built_and_loads_nothing_from_other_servers(site: Path) -> None:
    pages = {page.relative_to(site).with_suffix(".md") for page in site.rglob("*.html")}
    assert pages >= {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in site.rglob("*.html") if LOADED.search(page.read_text())]
    assert LOADED.search('<link rel="stylesheet" href="https://fonts.example/x.css">')


@pytest.mark.slow
def test_links_to_the_source_lead_to_pages_that_show_it(site: Path) -> None:
    assert "source/examples/ppo.py.html" in (site / "roles.html").read_text()
    assert "create_reference_client" in (site / "source" / "examples" / "ppo.py.html").read_text()


@pytest.mark.slow
def test_the_reference_has_every_option_command_endpoint_and_name(site: Path) -> None:
    def text(name: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / "reference" / f"{name}.html").read_text())

    assert not [option.flag for option in OPTIONS.values() if option.flag not in text("configuration")]
    assert not [command for command in COMMANDS if f"trainhouse {command}" not in text("commands")]
    assert not [name for name in trainhouse.__all__ if name not in text("client")]
    assert "POST /api/v1/forward_backward" in text("endpoints") and "learning_rate" in text("endpoints")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[a](missing.md)", "[a](index.md#missing)", "[a](../missing.py)"])
def test_a_wrong_link_fails(text: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
    config = (ROOT / "deploy" / "site" / "mkdocs.yml").read_text()
    config = config.partition("\nnav:")[0].replace("hooks: [hooks.py]", "").replace("../../docs", "docs")
    (tmp_path / "mkdocs.yml").write_text(config.replace("../../build", "build"))
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0 and "missing" in done.stderr
