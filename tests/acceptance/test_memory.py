"""A worker's resident memory at rest: about what it says of itself, whatever its passes were (benchmarks/soak.py)."""

import os
import sys
import time
from pathlib import Path

import pytest

from ..benchmarks.child import child
from ..benchmarks.soak import LONGEST, SHORTEST, TENANTS, sizes_of
from ..benchmarks.workload import MODEL, SHAPE
from ..live import live_server
from ..tiny import tiny_model

WORK_SECONDS, REST_SECONDS = 10, 90


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to give memory back")
def test_a_worker_at_rest_has_little_more_than_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the interpreter and its libraries, not of passes whose lengths were ever new."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = tiny_model("qwen3", tmp_path / "model", **SHAPE)
    threads = os.cpu_count() or 1
    with live_server({MODEL: model}, tmp_path / "state", threads=threads) as server, child("tenants") as tenants:
        tenants.ask({"url": server.url, "keys": [f"tml-{number}" for number in range(TENANTS)]})
        work = {"work": "ragged", "shortest": SHORTEST, "longest": LONGEST, "seconds": WORK_SECONDS}
        tenants.ask([work | {"seed": number} for number in range(TENANTS)])
        until = time.monotonic() + REST_SECONDS
        while (sizes := sizes_of(server, 0.0)).worker > sizes.allowed and time.monotonic() < until:
            time.sleep(1)
    assert sizes.worker <= sizes.allowed
