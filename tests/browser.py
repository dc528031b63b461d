"""A headless Chromium for tests, controlled through chromedriver by its own protocol (W3C
WebDriver: JSON over HTTP), so that no package is needed.

Debian's packages chromium and chromium-driver provide both. Tests that use them are skipped if they
are not installed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.zygote.children import eventually

MISSING = next(
    (
        f"{name} is not on PATH (Debian: packages chromium and chromium-driver)"
        for name in ("chromium", "chromedriver")
        if not shutil.which(name)
    ),
    None,
)
"""Reason why there is no browser; None if there is one."""

_LISTENS = re.compile(r"started successfully on port (\d+)")
_TRIES = 10
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


class Browser:
    """One window. Use it as a context manager."""

    def __init__(
        self, directory: Path, *, width: int = 1440, height: int = 1000, dark: bool = False
    ) -> None:
        """Starts a browser. `directory` is for its profile and its log; `dark` makes the system
        prefer dark colours."""
        self._driver, port = start_driver(directory / "chromedriver.log")
        try:
            self._address = f"http://127.0.0.1:{port}"
            flags = [
                *_FLAGS,
                f"--window-size={width},{height}",
                f"--user-data-dir={directory / 'profile'}",
            ]
            flags += ["--force-dark-mode"] if dark else []
            options = {"args": flags, "binary": shutil.which("chromium")}
            asked = {
                "capabilities": {
                    "alwaysMatch": {
                        "goog:chromeOptions": options,
                        "goog:loggingPrefs": {"browser": "ALL"},
                    }
                }
            }
            self._session = f"/session/{self._call('POST', '/session', asked)['sessionId']}"
        except BaseException:
            self._end()
            raise

    def open(self, url: str) -> None:
        """Opens a page."""
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript and returns its result."""
        return self._call(
            "POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)}
        )

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the visible elements that match a CSS selector."""
        found = (
            "[...document.querySelectorAll(arguments[0])].filter(e => "
            "e.checkVisibility()).map(e => e.innerText.trim())"
        )
        return list(self.run(f"return {found}", selector))

    def click(self, selector: str) -> None:
        """Clicks an element, as a person would."""
        self._call("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into an element."""
        self._call("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def complaints(self) -> list[str]:
        """Returns the console's errors since the last call: errors of the script, and violations of
        the page's policy."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page if `whole` is set."""
        asked: dict[str, Any] = {
            "cmd": "Page.captureScreenshot",
            "params": {"captureBeyondViewport": whole},
        }
        if whole:
            width, height = self.run(
                "const e = document.documentElement; return [e.clientWidth, e.scrollHeight]"
            )
            asked["params"] |= {
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            }
        path.write_bytes(
            base64.b64decode(self._call("POST", f"{self._session}/goog/cdp/execute", asked)["data"])
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._end()

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self._call(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        return next(iter(found.values()))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from error

    def _end(self) -> None:
        _end(self._driver)


def start_driver(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a chromedriver. Returns its process and the port that it listens on.

    chromedriver takes any free port on ::1 and then wants the same port on 127.0.0.1. If another
    process has that port, chromedriver reports it and ends. This happens occasionally beside tests
    that use hundreds of ports on 127.0.0.1, and another attempt gets another port.
    """
    for _ in range(_TRIES):
        with log.open("wb") as output:
            driver = subprocess.Popen(
                ["chromedriver", "--port=0"], stdout=output, stderr=subprocess.STDOUT
            )
        with contextlib.ExitStack() as unless_it_listens:
            unless_it_listens.callback(_end, driver)
            eventually(partial(_listens_or_ended, driver, log), "chromedriver to listen")
            if (listens := _LISTENS.search(log.read_text())) is not None:
                unless_it_listens.pop_all()
                return driver, int(listens[1])
    pytest.fail(
        f"chromedriver ended {_TRIES} times without listening; the last time it said: "
        f"{log.read_text()}"
    )


def _listens_or_ended(driver: subprocess.Popen[bytes], log: Path) -> bool:
    return driver.poll() is not None or _LISTENS.search(log.read_text()) is not None


def _end(driver: subprocess.Popen[bytes]) -> None:
    driver.terminate()
    driver.wait(30)
