"""The notebooks run from top to bottom against a live server, and are kept without outputs."""

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from ..live import LiveServer
from .blocks import ROOT
from .run_page import ADDRESS, HUB_ID

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 240


def run_notebook(text: str, server: LiveServer, directory: Path) -> None:
    """Runs all cells in a kernel of their own, with the server and model in place of those that they name."""
    notebook = nbformat.reads(HUB_ID.sub("tiny/chat", text).replace(ADDRESS, server.url), as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    asyncio.run(NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources).async_execute())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path, server: LiveServer, tmp_path: Path) -> None:
    run_notebook(path.read_text(), server, tmp_path)


@pytest.mark.slow
def test_a_notebook_that_does_not_learn_fails(server: LiveServer, tmp_path: Path) -> None:
    (path,) = (path for path in NOTEBOOKS if path.name == "sft.ipynb")
    text = path.read_text()
    assert "learning_rate=1e-3" in text
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run_notebook(text.replace("learning_rate=1e-3", "learning_rate=0"), server, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_no_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells and not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
