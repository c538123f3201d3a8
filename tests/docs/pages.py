"""Runs the Python of a page from top to bottom, as a reader would in one session."""

import re
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
"""The server's URL in the pages."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run_page(page: Path, url: str) -> dict[str, Any]:
    """Returns the names that the page's code has defined, with the server at `url`."""
    text, names = page.read_text().replace(URL, url), {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Empty lines in front: a traceback has the page's own line numbers.
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(page), "exec"), names)
    return names
