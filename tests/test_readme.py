"""The README's example works; targets, links and paths that documents name exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .live import LiveServer

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_client_example_runs_and_its_loss_falls(shared_server: LiveServer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 14
    code = code.replace("http://127.0.0.1:8000", shared_server.url).replace(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "tiny/chat"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[:10]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert is_target(document, link), link
    for path in re.findall(r"`((?:client|deploy|examples|schemas|server|tests|workers)/[\w/.-]*)`", text):
        assert (ROOT / path).exists(), path


def test_links_without_a_target_are_found() -> None:
    document = ROOT / "README.md"
    assert is_target(document, "docs/full.md#sampling")
    assert not is_target(document, "docs/fuller.md") and not is_target(document, "docs/full.md#samples")


def is_target(document: Path, link: str) -> bool:
    """True if the linked file exists and has the heading that the link names, if any."""
    name, _, anchor = link.partition("#")
    target = document.parent / name if name else document
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
