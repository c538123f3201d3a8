"""Tokenizers of several clients in one process."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..live import save_byte_tokenizer

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from trainhouse.client.tokenizer import load_directory
with ThreadPoolExecutor(8) as threads:
    print(sorted(each.eos_token_id for each in threads.map(load_directory, [sys.argv[1]] * 8)))
"""


@pytest.mark.slow
def test_tokenizers_load_in_several_threads_of_a_new_process(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == str([2] * 8)
