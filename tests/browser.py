"""A real browser: Debian's chromium, or another of its kind, driven through its own driver."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def browser() -> Iterator[Any]:
    """A driver with a fresh profile; the test fails where there is no browser to drive."""
    program = _found("chromium", "chromium-browser", "google-chrome")
    driver = _found("chromedriver")
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        try:
            opened = webdriver.Chrome(options=options, service=Service(driver))
        except WebDriverException as error:
            pytest.fail(f"the page was not tested: {program} does not start: {error.msg}", pytrace=False)
        try:
            yield opened
        finally:
            opened.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Give the page this many CSS pixels; a window cannot be made as narrow as a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def _found(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    why = f"there is no {' or '.join(names)} here. `make browser` installs it on Debian as root"
    pytest.fail(f"the page was not tested: {why}", pytrace=False)
