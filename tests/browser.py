"""A real browser for tests, as the fixture ``browser``: a test that asks for one is skipped where there is none."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


class Browser:
    """A few words for what the tests do with a page."""

    def __init__(self, downloads: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,800"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.downloads, self.driver = downloads, webdriver.Chrome(options=options, service=Service(DRIVER))
        self.run = self.driver.execute_script

    def open(self, address: str) -> None:
        self.driver.get("about:blank")  # so that another # is another page
        self.driver.get(address)

    def until(self, script: str, seconds: float = 120) -> Any:
        """The first value of a JavaScript expression that is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{self.text()}\n{self.complaints()}"
            time.sleep(0.1)
        return value

    def click(self, selector: str, text: str = "") -> None:
        """As a person does: the first element with this text. The page may draw it anew between looking and clicking."""
        from selenium.common.exceptions import StaleElementReferenceException
        for _ in range(20):
            with contextlib.suppress(StaleElementReferenceException):
                self.until(f"[...document.querySelectorAll({selector!r})].find(n => n.textContent.includes({text!r}))").click()
                return
        raise AssertionError(f"{selector} with {text!r} is drawn anew whenever it is looked at")

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def panels(self) -> list[str]:
        return self.run("return [...document.querySelectorAll('.panel h3')].map(h => h.textContent)")

    def saved(self, name: str) -> bytes:
        end = time.monotonic() + 120
        while not (files := list(self.downloads.glob(name))):
            assert time.monotonic() < end, f"{name} was not saved: {list(self.downloads.iterdir())}"
            time.sleep(0.1)
        content = files[0].read_bytes()
        files[0].unlink()
        return content

    def complaints(self) -> list[str]:
        """Of the browser: errors, and violations of the content security policy."""
        return [e["message"] for e in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (CHROMIUM and DRIVER and importlib.util.find_spec("selenium")):
        pytest.skip("needs a browser: apt-get install chromium chromium-driver, and pip install selenium")
    browser = Browser(tmp_path_factory.mktemp("downloads"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """Whatever a test does, the browser has nothing to complain about."""
    started.complaints()
    yield started
    assert started.complaints() == []
