"""The list of runs, and the page of a run with live curves."""

import pytest

from .browser import Browser
from .trained import METRIC, NAME, TrainedRun

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
