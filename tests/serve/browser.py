"""A headless Chromium, driven by selenium with the driver that is installed beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    "Chromium with chromedriver and selenium are needed;"
    " run apt install chromium chromium-driver and pip install selenium"
)


def programs() -> tuple[str, str] | None:
    """Finds the browser and its driver; None if there is no pair."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def browsing(width: int = 1000, height: int = 900, scale: int = 1) -> Iterator[Any]:
    """Runs a browser until the block ends.

    Raises:
        RuntimeError: If there is none.
    """
    found = programs()
    if found is None:
        raise RuntimeError(MISSING)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage",
        "hide-scrollbars", f"window-size={width},{height}", f"force-device-scale-factor={scale}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found[1]))
    try:
        yield driver
    finally:
        driver.quit()


def until(driver: Any, condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Waits until a condition is met, and returns it."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda _: condition())
