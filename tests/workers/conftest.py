"""Fixtures of the workers' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws does not hang on which ones this process has run before."""
    torch.manual_seed(0)
