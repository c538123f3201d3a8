"""Every block of code in the README and in docs/ works: docs/writing.md says how, and which comments steer it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import yaml
from trainhouse.server.config.load import load_config
from trainhouse.server.config.server_config import SECTIONS

from ..live import LiveServer
from .blocks import OUTPUT, PAGES, READ, ROOT, RUN, Block, blocks_of
from .commands import commands_of, flags, parse_command, variables_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MOST_NOT_RUN = 12
# Of the benchmarks, docker build, vLLM, SkyRL and Megatron.
OF_OTHER_PROGRAMS = {
    *("--only", "--without-graphs", "--without-triton", "--most-megabytes", "--target", "--trust-remote-code"),
    *("--enable-mixed-moe-lora-format", "--language-model-only", "--override-generation-config"),
    *("--backend", "--backend-config", "--checkpoints-base", "--cp-comm-type", "--sequence-parallel"),
    *("--tensor-model-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
}
RUN_PAGES = [
    page
    for page in PAGES
    if page.name != "quickstart.md"  # which installs a server: test_quickstart.py
    and any(block.page == page and block.language in RUN and not block.not_run for block in BLOCKS)
]


def run(page: Path, server: LiveServer, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs a page's blocks in a directory that has the examples."""
    (directory / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {
        "SERVER": server.url,
        "MODEL": "tiny/chat",
        "KEY": f"tml-{page.stem}",
        "OMP_NUM_THREADS": "1",
        "TRAINHOUSE_BASE_URL": server.url,
        "TRAINHOUSE_API_KEY": f"tml-{page.stem}",
        "HF_HUB_OFFLINE": "1",
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": f"tml-{page.stem}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "trainhouse.tests.docs.run_page", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=directory)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_runs_from_top_to_bottom(page: Path, server: LiveServer, tmp_path: Path) -> None:
    done = run(page, server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_page_that_fails_is_found_with_its_line(server: LiveServer, tmp_path: Path) -> None:
    page = ROOT / "docs" / "limits.md"
    for text, words in (
        ("```python\nx = 1\nmissing\n```\n", "line 3, in <module>"),
        ("```bash\nfalse\n```\n", "limits"),
    ):
        planted = tmp_path / text[3:7] / page.name
        planted.parent.mkdir()
        planted.write_text(text)
        done = run(planted, server, planted.parent)
        assert done.returncode != 0 and words in done.stdout + done.stderr


@pytest.mark.parametrize("block", [each for each in BLOCKS if not each.not_run], ids=lambda block: block.place)
def test_a_block_is_well_formed(block: Block) -> None:
    check(block)


def check(block: Block) -> None:
    """Raises an error if the block has an unknown language, bad syntax, or a command or option that does not exist."""
    assert block.language in (*RUN, *READ, *OUTPUT), f"{block.language!r} is not tested: see docs/writing.md"
    match block.language:
        case "python":
            compile(block.text, block.place, "exec")
        case "sh" | "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
            for arguments in commands_of(block.text):
                parse_command(arguments, variables_of(block.text))
        case "json":
            json.loads(block.text)
        case "yaml":
            list(yaml.safe_load_all(block.text))
        case "toml":
            check_toml(block.text)
        case "" | "text":
            commands = re.findall(r"^(?:\$|curl|import|trainhouse) (?!.*---|[0-9]).*", block.text, re.MULTILINE)
            assert not commands, "give the block a language"


def check_toml(text: str) -> None:
    """Checks the options of a server's file; files with other tables are not a server's."""
    if all(key in SECTIONS or not isinstance(value, dict) for key, value in tomllib.loads(text).items()):
        with NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            load_config({}, {}, Path(file.name))


def test_few_blocks_are_not_run() -> None:
    marked = [block for block in BLOCKS if block.not_run]
    assert len(marked) <= MOST_NOT_RUN, [block.place for block in marked]
    assert all(len(str(block.not_run).split()) >= 3 for block in marked), "say the reason"


@pytest.mark.slow
def test_flags_in_the_text_exist() -> None:
    known = flags() | OF_OTHER_PROGRAMS
    assert "--max-lora-rank" in known and "--max-rank" not in known
    for example in (ROOT / "examples").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', example.read_text()))
    named = {page: re.findall(r"`(?:trainhouse [^`]*)?(--[a-z-]+)", page.read_text()) for page in PAGES}
    assert sum(map(len, named.values())) > 300
    assert not [
        (page, flag) for page, found in named.items() for flag in found if flag not in known | OF_OTHER_PROGRAMS
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```sh\ntrainhouse serve --base-model M --no-such-option 1\n```",
        "```sh\ntrainhouse serve --base-model M --max-lora-rank many\n```",
        "```sh\ndocker run trainhouse keys make me\n```",
        "```sh\ntrainhouse chat --loud x\n```",
        "```sh\nif true\n```",
        "```python\nx = \n```",
        "```toml\nmax_lora_rnk = 8\n```",
        "```toml\n[limits]\ntenant_runs = 'x'\n```",
        "```json\n{1}\n```",
        "```yaml\na: [\n```",
        "```ruby\nx\n```",
        "```\ntrainhouse serve\n```",
    ],
)
def test_a_wrong_block_is_found(text: str, tmp_path: Path) -> None:
    page = tmp_path / "planted.md"
    page.write_text(text + "\n")
    (block,) = blocks_of(page)
    with pytest.raises(Exception):  # noqa: B017
        check(block)
