"""Runs the python and bash blocks of a page from top to bottom, as one session: python -m ...run_page PAGE.

Variables and functions live on in later blocks of the same language. Errors name the page's line.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from .blocks import RUN, blocks_of

ADDRESS = "http://127.0.0.1:8000"
HUB_ID = re.compile(
    r"\b(HuggingFaceTB|Qwen|allenai|deepseek-ai|google|meta-llama|mistralai|moonshotai|openai)/[A-Za-z][\w.-]*\w"
)
KEPT = """
keep() { { declare -p | grep --invert-match '^declare -[a-zA-Z]*r'; declare -f; } > "$PAGE_STATE" 2> /dev/null; }
trap 'status=$?; keep; exit $status' EXIT
[ -f "$PAGE_STATE" ] && source "$PAGE_STATE" 2> /dev/null
set -euo pipefail
"""


def run_page(page: Path, url: str, model: str) -> None:
    """Runs the page's blocks in the current directory, with the server and model in place of those that it names."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language not in RUN or block.not_run is not None:
            continue
        text = HUB_ID.sub(model, block.text).replace(ADDRESS, url)
        print(f"--- {block.place}", flush=True)
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
        else:
            environment = os.environ | {"PAGE_STATE": str(Path.cwd() / ".bash-state")}
            subprocess.run(["bash", "-c", KEPT + text], check=True, env=environment)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), os.environ["SERVER"], os.environ["MODEL"])
