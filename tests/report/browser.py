"""A real browser, without a screen: Chromium through its own driver.

python tests/report/browser.py report.html docs/report.png    the first screen of a report, as a desktop shows it
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PHONE, DESKTOP = (390, 844), (1440, 900)
_OWN = frozenset({"", "file", "data", "about", "blob", "chrome"})


@dataclass
class Browser:
    driver: Any

    def view(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """A window of that size, of a user who likes that scheme, and no motion: what still scrolls has not settled."""
        width, height = size
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        likes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in likes.items()])
        self.cdp("Emulation.setFocusEmulationEnabled", enabled=True)  # as if the window were the one in front

    def open(self, url: str) -> None:
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(url)

    def cdp(self, command: str, **arguments: object) -> dict[str, Any]:
        return self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console has of errors and warnings."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since `open`."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = (m for m in messages if m["method"] == "Network.requestWillBeSent")
        return [m["params"]["request"]["url"] for m in sent]

    def foreign(self, host: str = "") -> list[str]:
        """The requests that went anywhere but to the page's own host."""
        parts = [(url, urlsplit(url)) for url in self.requests()]
        return [url for url, p in parts if p.scheme not in _OWN and p.netloc != host]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.run("return document.scrollingElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, out: Path, *, whole: bool = True, format: str = "png") -> None:
        got = self.cdp("Page.captureScreenshot", format=format, captureBeyondViewport=whole)
        out.write_bytes(base64.b64decode(got["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Skips the test, with the reason, where there is none."""
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver, log_output=str(folder / "driver.log"))
    running = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(running)
    finally:
        running.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile, open_browser(Path(profile)) as shown:
        shown.view(DESKTOP)
        shown.open(Path(sys.argv[1]).resolve().as_uri())
        shown.screenshot(Path(sys.argv[2]), whole=False)
