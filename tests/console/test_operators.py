"""Pages for operators, on a server with keys; and no key in a URL, in the log or in the browser's storage."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import trainhouse
from trainhouse.server.store import DATABASE_NAME, SqliteStore
from trainhouse.server.tenants.auth import create_key

from ..live import LiveServer, live_server, save_byte_tokenizer
from ..tiny import tiny_model
from .browser import Browser, chromium
from .trained import train

pytestmark = pytest.mark.slow


@dataclass
class Operated:
    server: LiveServer
    browser: Browser
    administrator: str
    team: str


@pytest.fixture(autouse=True)
def no_problems_of_operators(operated: "Operated") -> Iterator[None]:
    yield
    assert not operated.browser.problems()


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    model, state_dir = tiny_model("llama", tmp_path_factory.mktemp("chat")), tmp_path_factory.mktemp("operated")
    save_byte_tokenizer(model)
    store = SqliteStore(state_dir / DATABASE_NAME)
    administrator = asyncio.run(create_key(store, "operations", ("train", "sample", "read", "admin", "operator")))
    team = asyncio.run(create_key(store, "team"))
    store.close()
    with live_server({"tiny/chat": model}, state_dir) as server, chromium(tmp_path_factory.mktemp("profile")) as driver:
        browser = Browser(driver, server.url, tmp_path_factory.mktemp("screenshots"))
        yield Operated(server, browser, administrator, team)


def test_capacity_shows_what_the_ranks_do_and_renews_itself(operated: Operated) -> None:
    browser = operated.browser
    browser.sign_in(operated.administrator)
    with train(operated.server.url, operated.team):
        browser.open("/console/capacity")
        assert "tiny/chat" in browser.text() and "optim" not in browser.text()
        assert len(browser.all("#capacity tbody tr")) > 8
        browser.until(lambda: "as of" in browser.text("#age"), "renewed")
        browser.screenshots("capacity")


def test_a_key_is_made_used_and_revoked(operated: Operated) -> None:
    browser = operated.browser
    browser.sign_in(operated.administrator)
    browser.open("/console/admin")
    assert "team" in browser.text()
    browser.one("#name").send_keys("newcomers")
    browser.one("#new-key button").click()
    browser.until(lambda: browser.text("#made-key"), "shown")
    key = browser.text("#made-key")
    browser.screenshots("new-key")
    with trainhouse.ServiceClient(operated.server.url, key, retry_seconds=1) as service:
        assert service.get_limits().tenant == "newcomers"
        browser.follow("#made a")
        assert key not in browser.driver.page_source
        browser.screenshots("admin")
        row = "return [...document.querySelectorAll('tr')].find((one) => one.innerText.includes('newcomers') &&"
        browser.script(f"{row} one.querySelector('button')).querySelector('button').click()")
        browser.follow("#confirm-yes")
        with pytest.raises(trainhouse.APIStatusError, match="revoked"):
            service.get_limits()


def test_a_tenant_sees_no_pages_of_operators(operated: Operated) -> None:
    browser = operated.browser
    browser.sign_in(operated.team)
    assert "Admin" not in browser.text("header")
    browser.open("/console/admin")
    assert "403" in browser.text("h1") and "needs operator" in browser.text()
    browser.screenshots("refused")
    (entry,) = browser.problems()  # Chromium notes every 4xx
    assert "403" in entry


def test_keys_are_in_no_url_log_or_storage(operated: Operated) -> None:
    browser = operated.browser
    browser.sign_in(operated.team)
    browser.open("/console/runs")
    stored = browser.script("return JSON.stringify([localStorage, sessionStorage, document.cookie, document.URL])")
    assert operated.team not in stored and "trainhouse_console" not in stored, "scripts cannot read the cookie"
    urls = [one["url"] for one in browser.requests()]
    assert any("/console/runs" in url for url in urls) and not any("tml-" in url for url in urls)
    for path in operated.server.state_dir.rglob("*"):
        if path.is_file():
            assert operated.team.encode() not in path.read_bytes(), path
    browser.one("[data-sign-out]").click()
    browser.until(lambda: browser.driver.current_url.endswith("/console/sign-in"), "signed out")
    browser.screenshots("sign-in")
    browser.open("/console/runs")
    assert "/console/sign-in" in browser.driver.current_url
    browser.one("#key").send_keys("tml-wrong")
    browser.follow("form button")
    assert "unknown or revoked" in browser.text("[role=alert]") and browser.one("#key").get_attribute("value") == ""
    browser.screenshots("wrong-key")
    (entry,) = browser.problems()
    assert "401" in entry
