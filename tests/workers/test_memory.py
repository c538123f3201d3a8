"""The allocator's setting, by the page faults that it saves."""

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
import torch
from trainhouse.workers.memory import tune_allocator
if sys.argv[1] == "tuned" and not tune_allocator():
    print("other allocator")
    sys.exit()
for _ in range(12):
    torch.ones(10 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(10 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, mode]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    if answer == "other allocator":
        pytest.skip("the C library is not glibc")
    return int(answer)


def test_a_tuned_allocator_reuses_large_blocks_without_page_faults() -> None:
    assert page_faults("tuned") < 100 < page_faults("as is")
