"""The playground: text as it is sampled, and the probability of each token."""

import math

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from .browser import Browser
from .trained import TrainedRun

pytestmark = pytest.mark.slow


def fill(browser: Browser, side: str, model: str, prompt: str, kind: str = "text") -> None:
    code = """const form = document.querySelector(`#${arguments[0]} form`);
        [form.model.value, form.prompt.value, form.kind.value, form.tokens.value, form.temperature.value] =
        [arguments[1], arguments[2], arguments[3], 12, 0]"""
    browser.script(code, side, model, prompt, kind)


def sample(browser: Browser, side: str) -> str:
    browser.one(f"#{side} button[type=submit]").click()
    browser.until(lambda: "tokens in" in browser.text(f"#{side} .status"), "sampled")
    return browser.script("return document.querySelector(arguments[0]).textContent", f"#{side} .output")


def test_samples_show_the_probabilities_of_tokens(browser: Browser, trained: TrainedRun) -> None:
    sampler = trained.client.save_weights_and_get_sampling_client()
    browser.open("/console/playground")
    assert sampler.sampler_id in browser.script("return document.querySelector('#models').innerHTML")
    fill(browser, "left", "tiny/chat", "Hello")
    base = sample(browser, "left")
    assert len(browser.all("#left .output span")) > 1
    ActionChains(browser.driver).move_to_element(browser.one("#left .output span")).perform()
    rows = [row.text.rsplit(maxsplit=2) for row in browser.all("#left .token tbody tr")]
    percents = [float(row[1]) for row in rows]
    assert 5 <= len(rows) <= 6 and percents == sorted(percents, reverse=True) and math.fsum(percents) <= 100.5
    assert rows[0][0] == browser.text("#left .taken td"), "at temperature 0 the likeliest token is taken"
    browser.one("#left .output").send_keys(Keys.ARROW_RIGHT)
    chosen = "return document.querySelector('#left .chosen').dataset.at"
    assert browser.script(chosen) == "1"
    browser.one("#second").click()
    fill(browser, "right", sampler.sampler_id, "Hello", "chat")
    assert sample(browser, "right") != base
    browser.screenshots("playground")
    browser.one("#second").click()
    assert not browser.one("#right").is_displayed()


def test_a_refusal_is_shown(browser: Browser, trained: TrainedRun) -> None:
    browser.open("/console/playground?model=tinker://no/weights/a")
    fill(browser, "left", "no-such-model", "Hello")
    browser.one("#left button[type=submit]").click()
    browser.until(lambda: "no-such-model does not exist" in browser.text("#notices"), "refused")
    assert browser.text("#left .status") == "failed"
    (entry,) = browser.problems()  # Chromium notes every 4xx
    assert "404" in entry
