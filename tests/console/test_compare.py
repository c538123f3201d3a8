"""The page that overlays runs: without runs, of runs that have ended, with names; and a page that is not there."""

from urllib.parse import unquote

import pytest
import trainhouse
from trainhouse import AdamParams, Datum

from .browser import Browser
from .test_runs import charts
from .trained import KEY

pytestmark = pytest.mark.slow


def ended_run(url: str, name: str) -> str:
    """Trains one step in a session of this name, which then ends; returns the run's id."""
    with trainhouse.ServiceClient(url, KEY, display_name=name) as service:
        client = service.create_lora_training_client("tiny/chat", rank=4)
        datum = Datum([3, 4, 5], {"target_tokens": [4, 5, 6], "weights": [1.0, 1.0, 1.0]})
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(AdamParams(learning_rate=1e-2)).result()
        return client.model_id


def test_nothing_is_overlaid_without_runs_and_no_script_fails(browser: Browser) -> None:
    browser.open("/console/compare")
    assert "Name a run, or select some in the list." in browser.text() and not charts(browser)
    browser.follow("main .card a")
    assert browser.driver.current_url == f"{browser.url}/console/runs"


def test_an_overlay_of_ended_runs_is_complete_and_names_them(browser: Browser) -> None:
    names = ["<b>warm</b> house", "cold house"]
    run_ids = [ended_run(browser.url, name) for name in names]
    browser.open(f"/console/compare?run={run_ids[0]}&run={run_ids[1]}")
    browser.until(lambda: "loss:mean" in charts(browser), "drawn")
    browser.until(lambda: browser.text("#live") == "complete", "said to be complete, as both runs have ended")
    links = {one.text: unquote(one.get_attribute("href") or "") for one in browser.all("#legend a")}
    assert links == {name: f"{browser.url}/console/runs/{run_id}" for name, run_id in zip(names, run_ids, strict=True)}
    browser.follow("#legend a")
    assert browser.text("h1") == "<b>warm</b> house" and browser.text("#live") != "live"


def test_a_page_that_is_not_there_has_the_navigation(browser: Browser) -> None:
    browser.open("/console/no-such-page")
    (problem,) = browser.problems()
    assert "404" in problem
    browser.follow("header nav a[href$='/console/runs']")
    assert browser.driver.current_url == f"{browser.url}/console/runs"
