"""Shared fixtures: tiny models, and servers on them."""

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Must precede any import of transformers: tests use no hub, and print no progress bars.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TINKER_TELEMETRY"] = "0"
# Must precede the import of torch. Tiny models gain nothing from threads, which would spin while other tests have the
# cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import trainhouse

from .drawn import forget_borders
from .live import DEPLOYMENTS, EACH_LAYOUT, RUNNING, LiveServer, live_server, save_byte_tokenizer

if TYPE_CHECKING:  # a machine with a GPU may have no SQLAlchemy
    from .postgres import Databases

ROOT = Path(__file__).resolve().parent.parent
assert Path(trainhouse.__file__).resolve().parent == ROOT, (
    f"trainhouse is imported from {trainhouse.__file__}, not from this checkout: run `make setup` here"
)


class TinyModels(dict[str, Path]):
    """Maps a kind to the directory of a saved random model, which is made at the first access."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, kind: str) -> Path:
        from .tiny import tiny_model

        self[kind] = tiny_model(kind, self._root / kind)
        return self[kind]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Maps a kind to the directory of a saved random model."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def one_border() -> None:
    forget_borders()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Runs async tests with asyncio only: selenium brings trio, with which they would be repeated."""
    return "asyncio"


@pytest.fixture(params=["kernels", "torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with kernels.c, and as if there were no compiler."""
    from trainhouse.workers.ops import kernels
    from trainhouse.workers.protocol.plugins import plugin_rows

    if request.param == "torch":
        monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    elif kernels.load_kernels() is None:
        assert not plugin_rows("workers.ops.cpu.kernels", "KERNELS"), "no C compiler here: install gcc or clang"
        pytest.skip("the plugin of the CPU's kernels was taken away")


@pytest.fixture(scope="session", params=EACH_LAYOUT)
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves "tiny/chat" (a random Llama with a byte-level tokenizer); clients chunk their batches by five datums."""
    from .tiny import tiny_model

    model = tiny_model("llama", tmp_path_factory.mktemp("chat"))
    save_byte_tokenizer(model)
    options = {"sdk_max_chunk_datums": 5} | DEPLOYMENTS[request.param]
    with live_server({"tiny/chat": model}, tmp_path_factory.mktemp("state"), **options) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> "Iterator[Databases]":
    from .postgres import NoPostgresError, databases

    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(databases())
        except NoPostgresError as error:
            pytest.skip(str(error))
        yield running


@pytest.fixture
def postgres_url(postgres: "Databases") -> Iterator[str]:
    """Yields the URL of an empty database, for --database-url."""
    with postgres.database() as url:
        yield url


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("TRAINHOUSE_VLLM_PYTHON")
    if not python:
        pytest.skip("TRAINHOUSE_VLLM_PYTHON names no Python that has vLLM: make test-vllm")
    return python


gc.disable()  # until the tests are collected, which takes a quarter less time without it


def pytest_collection_finish() -> None:
    """Freezes imported objects and tests: scanning them would take a second in each garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the running live servers to a failure's report."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {server.url}", server.log_tail()) for server in RUNNING]
    return report
