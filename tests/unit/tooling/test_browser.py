"""The browser of the tests starts even if other processes use the ports that its driver wants."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.browser import MISSING, start_driver

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

SAYS_TAKEN = 'echo "IPv4 port not available. Exiting..."; exit 1'
"""Imitates chromedriver when the port that it got on ::1 belongs to another process on 127.0.0.1.
The port is random."""


def put_first_on_path(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    driver = directory / "chromedriver"
    driver.write_text(f"#!/bin/sh\n{script}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_driver_whose_port_is_taken_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("chromedriver")
    put_first_on_path(
        tmp_path / "bin",
        f'if mkdir "{tmp_path}/began"; then {SAYS_TAKEN}; fi; exec {real} "$@"',
        monkeypatch,
    )
    driver, port = start_driver(tmp_path / "log")
    driver.terminate()
    driver.wait(30)
    assert port > 0


def test_driver_that_never_listens_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_first_on_path(tmp_path / "bin", SAYS_TAKEN, monkeypatch)
    with pytest.raises(
        pytest.fail.Exception,
        match="without listening; the last time it said: IPv4 port not available",
    ):
        start_driver(tmp_path / "log")
