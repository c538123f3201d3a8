"""`make check` runs the files that start no process and build no model."""

import pytest

from .unit import ROOT, unit_test_files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "is_unit_test"),
    [
        ("schemas/test_codec.py", True),
        ("server/checkpoints/test_checkpoints.py", True),
        ("client/test_names.py", False),  # starts a process
        ("workers/pools/test_pool.py", False),  # starts workers
        ("workers/scheduler/test_roles_apart.py", False),  # by helpers of another test file
        ("server/serving/test_connections.py", False),  # has a fixture that listens
        ("workers/training/test_policy.py", False),  # builds a model
    ],
)
def test_unit_test_files_are_found(file: str, is_unit_test: bool) -> None:
    assert (ROOT / "tests" / file in unit_test_files()) == is_unit_test
