"""A worker's resident memory at rest is about what it accounts for, after any passes (benchmarks/memory.py)."""

import sys
import time
from pathlib import Path

import pytest

from ..benchmarks.harness import SHAPE, Setup
from ..benchmarks.memory import ragged_tenants, sizes_of
from ..tiny import tiny_model

WORK_SECONDS, REST_SECONDS = 10, 90


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has a call that returns memory")
def test_resident_memory_at_rest_is_close_to_the_accounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = tiny_model("qwen3", tmp_path / "model", **SHAPE)
    setup = Setup(model, tmp_path, "local", rounds=1)
    with setup.server("state") as server, ragged_tenants(server, WORK_SECONDS) as tenants:
        tenants.receive()
        until = time.monotonic() + REST_SECONDS
        while (sizes := sizes_of(server)).worker > sizes.allowed and time.monotonic() < until:
            time.sleep(1)
    assert sizes.worker <= sizes.allowed
