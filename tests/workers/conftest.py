"""Fixtures of the workers' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Seeds torch, so that a test's random numbers do not depend on the tests that ran before it."""
    torch.manual_seed(0)
