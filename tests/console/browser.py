"""A headless Chromium, driven by selenium."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

SCREENSHOTS = "TRAINHOUSE_SCREENSHOTS"
"""Names a folder for the screenshots, which otherwise are in pytest's temporary folder."""
WIDE, NARROW = 1280, 390
_PROGRAMS = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "chromedriver": ("chromedriver",)}


def program(name: str) -> str:
    """Returns the path of a program; skips the test if there is none."""
    found = next((path for one in _PROGRAMS[name] if (path := shutil.which(one))), None)
    if found is None:
        pytest.skip(f"there is no {name} here: make browser")
    return found


@contextmanager
def chromium(profile: Path, dark: bool = False) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
    # Without a sandbox, which containers forbid: it opens only our own pages.
    flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={profile}", "--force-device-scale-factor=1", "--disable-background-networking"]
    for flag in [*flags, "--no-first-run", *(["--force-dark-mode"] if dark else [])]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program("chromedriver")))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


class Browser:
    """A browser on one server. url: of the server."""

    def __init__(self, driver: webdriver.Chrome, url: str, screenshots: Path) -> None:
        self.driver = driver
        self.url = url
        self._screenshots = Path(os.environ.get(SCREENSHOTS) or screenshots)
        self._screenshots.mkdir(parents=True, exist_ok=True)
        self.resize(WIDE)

    def open(self, path: str) -> None:
        self.driver.get(f"{self.url}{path}")

    def sign_in(self, key: str) -> None:
        """Signs in with a key, whether or not another is signed in."""
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.open("/console/sign-in")
        self.one("#key").send_keys(key)
        self.follow("form button")

    def follow(self, selector: str) -> None:
        """Clicks on what leads to another page, and waits for that."""
        self.script("window.isLeft = true")
        self.one(selector).click()
        loaded = "return !window.isLeft && document.readyState === 'complete'"
        self.until(lambda: self.script(loaded), "on the next page")

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshots(self, name: str) -> None:
        """Saves the page at both widths; nothing may be wider than the page, except what scrolls on its own."""
        for width in (WIDE, NARROW):
            self.resize(width)
            time.sleep(0.4)  # charts are resized in a later frame
            self.driver.save_screenshot(str(self._screenshots / f"{name}-{width}.png"))
            assert self.script("return document.documentElement.scrollWidth") <= width, f"{name} at {width}"
        self.resize(WIDE)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "main") -> str:
        return self.one(selector).text

    def script(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def until(self, is_true: Callable[[], object], what: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, f"not {what} after {seconds} s: {self.text('body')[:2000]}"
            time.sleep(0.05)

    def requests(self) -> list[dict[str, Any]]:
        """Returns the requests that the browser has sent since the last call."""
        entries = self.driver.get_log("performance")  # pyright: ignore[reportAttributeAccessIssue]
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [one["params"]["request"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def problems(self) -> list[str]:
        """Returns what the browser complained about since the last call: errors, and violations of the policy."""
        entries = self.driver.get_log("browser")  # pyright: ignore[reportAttributeAccessIssue]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
