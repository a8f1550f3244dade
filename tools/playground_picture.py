"""Take the picture of the playground that docs/serving.md shows, with chromium and chromedriver (`make browser`).

    shoal serve --port 8123 &
    python tools/playground_picture.py http://127.0.0.1:8123 docs/images/playground.png
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

WIDTH, HEIGHT = 1240, 960
SECONDS = 60


def main(url: str, out: str) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = webdriver.Chrome(_options(profile), Service(shutil.which("chromedriver")))
        try:
            Path(out).write_bytes(_taken(driver, url))
        finally:
            driver.quit()


def _options(profile: str) -> webdriver.ChromeOptions:
    options = webdriver.ChromeOptions()
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    flags += ["--disable-background-networking", "--disable-dev-shm-usage"]
    for flag in (*flags, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    return options


def _taken(driver: webdriver.Chrome, url: str) -> bytes:
    """The page after an answer by D3 beside one at full depth, as PNG."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(f"{url}/#view=compare")
    wait = WebDriverWait(driver, SECONDS)
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, "[data-knob=alpha]"))
    driver.find_element(By.ID, "settings").click()
    Select(driver.find_element(By.ID, "method")).select_by_value("d3")
    driver.find_element(By.CSS_SELECTOR, "[data-knob=alpha]").send_keys("0.997")
    for _ in range(2):  # the first run warms the server up
        driver.find_element(By.ID, "run").click()
        wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, ".text span"))
        wait.until(lambda page: page.find_element(By.ID, "run").is_enabled())
    return driver.get_screenshot_as_png()


if __name__ == "__main__":
    main(*sys.argv[1:])
