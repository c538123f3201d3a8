"""Pages of sessions and checkpoints, and what their buttons change."""

import pytest
from selenium.webdriver.common.keys import Keys

from .browser import Browser
from .trained import KEY, NAME, TrainedRun

pytestmark = pytest.mark.slow


def press_and_confirm(browser: Browser, selector: str) -> None:
    """Presses a button that asks first, and answers yes; waits for the next page."""
    browser.one(selector).click()
    assert browser.one("#confirm").is_displayed()
    browser.follow("#confirm-yes")


def test_checkpoints_are_published_kept_sampled_and_deleted(browser: Browser, trained: TrainedRun) -> None:
    for name in ("first", "second"):
        trained.client.save_state(name).result()
    path = trained.client.save_weights_for_sampler("sampled").result().path
    browser.open("/console/checkpoints")
    assert all(f"weights/{name}" in browser.text() for name in ("first", "second")) and "KiB" in browser.text()
    browser.screenshots("checkpoints")
    browser.follow("a[href$='/weights/first']")
    browser.screenshots("checkpoint")
    assert "private" not in browser.text()
    press_and_confirm(browser, "button[data-url$=publish]")
    assert "public" in browser.text(".head") and "The checkpoint is public." in browser.text("#notices")
    browser.follow("button[data-url$=publish]")
    assert "public" not in browser.text(".head")
    browser.script("document.querySelector('#ttl').value = '604800'")
    browser.follow("form[data-method=PUT] button")
    (saved,) = (one for one in checkpoints_of(trained) if one.checkpoint_id == "weights/first")
    assert saved.expires_at is not None and not saved.public
    file = browser.script("return document.querySelector('a[href*=adapter_model]').href")
    size = "return fetch(arguments[0]).then((one) => one.arrayBuffer()).then((one) => one.byteLength)"
    assert browser.script(size, file) > 1000
    browser.one("button[data-yes=Delete]").click()
    browser.screenshots("delete")
    browser.one("#confirm").send_keys(Keys.ESCAPE)
    browser.until(lambda: not browser.one("#confirm").is_displayed(), "closed")
    assert "weights/first" in [one.checkpoint_id for one in checkpoints_of(trained)], "Escape deletes nothing"
    press_and_confirm(browser, "button[data-yes=Delete]")
    assert browser.driver.current_url.endswith("/console/checkpoints") and "weights/first" not in browser.text()
    assert "weights/first" not in [one.checkpoint_id for one in checkpoints_of(trained)]
    browser.open(f"/console/runs/{trained.run_id}/checkpoints")
    browser.follow("a[href$='/sampler_weights/sampled']")
    browser.follow("main a[href*=playground]")
    assert browser.one("#left-model").get_attribute("value") == path


def checkpoints_of(trained: TrainedRun):
    return trained.service.create_rest_client().list_checkpoints(trained.run_id).result().checkpoints


def test_sessions_are_found_and_ended(browser: Browser, trained: TrainedRun) -> None:
    import trainhouse

    with trainhouse.ServiceClient(browser.url, KEY, user_metadata={"purpose": "to be ended"}) as service:
        run_id = service.create_lora_training_client("tiny/chat", rank=4).model_id
        browser.open("/console/sessions")
        assert NAME in browser.text() and "to be ended" in browser.text()
        browser.screenshots("sessions")
        browser.open("/console/sessions?search=to+be+ended&state=open")
        assert NAME not in browser.text()
        browser.follow("tbody a")
        assert run_id in browser.text()
        browser.screenshots("session")
        press_and_confirm(browser, "button[data-url$=finish]")
        assert "interrupted" in browser.text(".head") and "ended in the console" in browser.text()
    browser.open("/console/sessions?search=to+be+ended&state=open")
    assert "No session matches." in browser.text()
