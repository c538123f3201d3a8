"""The list of runs, and the page of a run with live curves."""

import contextlib
import time
from pathlib import Path

import httpx
import pytest
import trainhouse
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from ..live import live_server, save_byte_tokenizer
from ..tiny import tiny_model
from .browser import Browser
from .trained import KEY, METRIC, NAME, TrainedRun, train

pytestmark = pytest.mark.slow


def charts(browser: Browser) -> dict[str, str]:
    """Returns the caption of each chart, by metric."""
    code = "return [...document.querySelectorAll('.chart')].map((one) => [one.dataset.metric, one.innerText])"
    return dict(browser.script(code))


def test_runs_are_listed_found_and_shown_as_text(browser: Browser, trained: TrainedRun) -> None:
    browser.open("/")
    assert browser.driver.current_url == f"{browser.url}/console/runs"
    assert trained.run_id in browser.text() and NAME in browser.text()
    browser.screenshots("runs")
    browser.one("#search").send_keys("no such run")
    browser.follow("[role=search] button")
    assert "No run has" in browser.text()
    browser.one("#search").clear()
    browser.one("#search").send_keys("TINY/chat")
    browser.follow("[role=search] button")
    browser.follow(f"a[href*='{trained.run_id.partition(':')[0]}']")
    assert browser.text("h1") == trained.run_id
    assert browser.driver.title != "broken"


def test_curves_move_without_a_reload(browser: Browser, trained: TrainedRun) -> None:
    browser.open(f"/console/runs/{trained.run_id}")
    browser.until(lambda: "loss:mean" in charts(browser), "drawn")
    browser.until(lambda: browser.text("#live") == "live", "live")
    num_parameters = trained.client.get_info().num_parameters
    assert num_parameters and f"Trained parameters\n{num_parameters:,}" in browser.text(".facts")
    shown = charts(browser)
    expected = ["loss:mean", "reward", "kl", METRIC, "learning_rate", "unclipped_grad_l2:mean", "tokens_per_second"]
    assert [*shown][:9] == [*expected, "step_seconds", "queued_seconds"]
    before = f"at {trained.num_steps}"
    assert before in shown["loss:mean"] and before in shown["reward"]
    trained.step(3)
    after = f"at {trained.num_steps}"
    browser.until(lambda: after in charts(browser)["loss:mean"] and after in charts(browser)["reward"], "moved")
    browser.screenshots("run")
    assert browser.driver.title != "broken"


def colors(browser: Browser, canvas: str = ".chart canvas") -> set[str]:
    """Returns the opaque colours of a chart, those of its lines among them."""
    code = """const canvas = document.querySelector(arguments[0]), seen = new Set();
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
        return [...seen]"""
    return set(browser.script(code, canvas))


def test_runs_are_overlaid_smoothed_and_drawn_in_log_scale(browser: Browser, trained: TrainedRun) -> None:
    with train(browser.url, learning_rate=1e-3) as other:  # its losses differ, so that no line hides the other
        browser.open("/console/runs")
        for run in (trained, other):
            browser.one(f"input[value='{run.run_id}']").click()
        browser.follow("form[action$=compare] button")
        browser.until(lambda: "loss:mean" in charts(browser), "drawn")
        assert {trained.run_id, other.run_id} <= set(browser.text("#legend").split())
        assert {"48,86,211", "194,65,12"} <= colors(browser), "a line for each run"
        assert charts(browser)["loss:mean"].count("·") == 1, "a value of each run"
        linear = axis_of(browser)
        browser.one("#log-scale").click()
        browser.until(lambda: axis_of(browser) != linear, "in log scale")
        browser.one("#smoothing").send_keys(30 * Keys.ARROW_RIGHT)
        assert browser.text("#smoothing-value") == "0.6"
        flat = "[data-metric=learning_rate] canvas"
        browser.until(lambda: "194,65,12" in colors(browser, flat), "a flat line, too")
        browser.screenshots("compare")
        browser.prefer("dark")
        browser.until(lambda: "124,155,255" in colors(browser), "dark")
        browser.screenshots("compare-dark")
        browser.prefer("light")
        other.step(1)
        browser.until(lambda: f"at {max(trained.num_steps, other.num_steps)}" in charts(browser)["loss:mean"], "live")
        browser.open(f"/console/runs/{trained.run_id}")
        browser.until(lambda: "loss:mean" in charts(browser), "drawn")
        assert browser.one("#log-scale").is_selected(), "choices are kept"
        browser.script("localStorage.clear()")
    browser.open(f"/console/runs/{other.run_id}")
    browser.until(lambda: browser.text("#live") == "complete", "said to be complete, as the run has ended")


def axis_of(browser: Browser) -> str:
    return browser.script("return document.querySelector('.chart canvas').toDataURL()")


def test_the_timeline_shows_failures_and_their_reasons(browser: Browser, trained: TrainedRun) -> None:
    with pytest.raises(trainhouse.RequestFailedError):
        trained.client.optim_step(trainhouse.AdamParams(learning_rate=1e-2)).result()
    browser.open(f"/console/runs/{trained.run_id}")
    browser.follow(".tabs a[href$=operations]")
    browser.until(lambda: browser.driver.refresh() or "failed" in browser.text("tbody"), "stored")
    assert "gradients" in browser.text(".reason") and len(browser.all("svg rect.failed")) == 1
    browser.screenshots("timeline")
    browser.one("[name=failed]").click()
    browser.follow("main form button")
    assert len(browser.all("tbody tr")) == 1


def test_a_page_is_used_by_keyboard(browser: Browser, trained: TrainedRun) -> None:
    browser.open("/console/runs")
    focused = "return document.activeElement.textContent.trim() || document.activeElement.id"
    seen = []
    for _ in range(12):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        seen.append(browser.script(focused))
        outline = browser.script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{seen[-1]} shows that it has the focus"
    assert seen[0] == "Skip to the content" and {"Sessions", "Sign out", "search", "Search"} <= set(seen)


def test_an_open_page_does_not_delay_a_stop(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "chat")
    save_byte_tokenizer(model)
    with contextlib.ExitStack() as stack:
        with live_server({"tiny/chat": model}, tmp_path / "state") as server:
            run = stack.enter_context(train(server.url))
            url = f"{server.url}/console/events?run={run.run_id}"
            events = stack.enter_context(httpx.stream("GET", url, headers={"X-API-Key": KEY}, timeout=60)).iter_lines()
            assert next(events) == ": connected"
            assert any(line.startswith("data: ") for line in events)
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 8, "its last news were long sent"
        assert "data" not in "".join(events)
