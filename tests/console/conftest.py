"""A live server with a run that has trained, and a browser that is signed in."""

from collections.abc import Iterator

import pytest

from ..live import LiveServer, live_server, save_byte_tokenizer
from ..tiny import tiny_model
from .browser import Browser, chromium
from .trained import KEY, TrainedRun, train


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model("llama", tmp_path_factory.mktemp("chat"))
    save_byte_tokenizer(model)
    with live_server({"tiny/chat": model}, tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.fixture(scope="package")
def trained(server: LiveServer) -> Iterator[TrainedRun]:
    with train(server.url) as run:
        yield run


@pytest.fixture(scope="package")
def browser(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        browser = Browser(driver, server.url, tmp_path_factory.mktemp("screenshots"))
        browser.sign_in(KEY)
        yield browser


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave an error or a violation of the content security policy in the browser's console."""
    yield
    if "browser" in request.fixturenames:
        assert not request.getfixturevalue("browser").problems()
