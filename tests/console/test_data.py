"""The page that shows data token by token."""

import json

import pytest

from .browser import Browser

pytestmark = pytest.mark.slow

DATUM = {"model_input": [72, 105, 33], "loss_fn_inputs": {"target_tokens": [105, 33, 10], "weights": [0, 1, 0.2]}}


def test_pasted_data_are_shown_and_refusals_explained(browser: Browser) -> None:
    browser.open("/console/data")
    browser.script("document.querySelector('#text').value = arguments[0]", "\n".join([json.dumps(DATUM)] * 2))
    browser.one("#data button[type=submit]").click()
    browser.until(lambda: browser.text("#status") == "2 shown", "shown")
    assert [one.get_attribute("class") for one in browser.all("section:first-child .output span")] == [
        *("read", "read"),
        *("up4", "up1"),
    ]
    browser.screenshots("data")
    browser.script("document.querySelector('#text').value = '[1]'")
    browser.one("#data button[type=submit]").click()
    browser.until(lambda: "expected a datum" in browser.text("#notices"), "refused")
    (entry,) = browser.problems()  # Chromium notes every 4xx
    assert "400" in entry
