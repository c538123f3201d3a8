"""Results of undisturbed training scripts, and a collection of what the official SDK leaves open.

The SDK never closes some of its connections; tests must not fail because of them.
"""

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from .crashing import Crashing, Trained, train

Undisturbed = Callable[..., list[Trained]]
"""Takes the number of steps, and what is trained (see training_script)."""


@pytest.fixture(scope="session")
def undisturbed(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @cache
    def trained(num_steps: int, training: str = "lora") -> list[Trained]:
        package = "tinker" if training == "lora" else "trainhouse"  # only our client makes others
        with Crashing(tiny_models["qwen3"], tmp_path_factory.mktemp("calm")).running() as calm:
            return train(calm, num_steps, {}, package, training=training)

    return trained


@pytest.fixture(scope="package", autouse=True)
def _collect_sdk_leftovers() -> Iterator[None]:
    """Runs right after these tests; otherwise a later test would fail because of objects collected while it runs."""
    yield
    deadline = time.monotonic() + 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        # Its background thread may be closing a client at this moment.
        while _has_open_transports() and time.monotonic() < deadline:
            time.sleep(0.2)
            gc.collect()


def _has_open_transports() -> bool:
    # Not isinstance, which would trigger lazy proxies of other libraries, some of which warn.
    return any(issubclass(type(each), asyncio.Transport) for each in gc.get_objects())
