"""A server of tiny models under the cookbook's default names, and a model that a recipe taught there."""

import os
from collections.abc import Iterator

import pytest

from ...live import live_server
from .data_sets import write_data_sets
from .releases import write_releases
from .user import Cookbook, Run


@pytest.fixture(scope="package")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    python = os.environ.get("TRAINHOUSE_COOKBOOK_PYTHON")
    if not python:
        pytest.skip("TRAINHOUSE_COOKBOOK_PYTHON names no Python that has tinker-cookbook: make test-cookbook")
    folder = tmp_path_factory.mktemp("cookbook")
    models = write_releases(folder)
    write_data_sets(folder)
    with live_server(models, folder / "state") as server:
        yield Cookbook(python, folder, server.url)


@pytest.fixture(scope="package")
def taught(cookbook: Cookbook) -> Run:
    """Returns the run in which Qwen3.5-9B-Base learned to answer with 3 or 4."""
    return cookbook.recipe("sl_loop", "sl-loop", batch_size=16, learning_rate=1e-2)
