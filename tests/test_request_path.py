"""Bounds the functions, files and frames that one forward_backward runs through: see request_path.py."""

from pathlib import Path

import pytest

from .request_path import trace_request

# Measured: 366 to 368, 87 or 88, and 11; what runs in the background adds a few functions now and then. They only fall.
MAX_FUNCTIONS, MAX_FILES, MAX_FRAMES = 373, 89, 11


@pytest.mark.slow
def test_a_request_runs_through_a_bounded_number_of_functions(tmp_path: Path) -> None:
    server, worker = trace_request(tmp_path)
    assert "server/runs/run.py:Run.submit" in server.functions, "the trace must hold the path"
    assert worker.stack[0].startswith("workers/") and worker.stack[-1].startswith("workers/pools/")
    assert len(worker.stack) <= MAX_FRAMES, "\n".join(worker.stack)
    assert len(server.functions | worker.functions) <= MAX_FUNCTIONS
    assert len(server.files | worker.files) <= MAX_FILES
