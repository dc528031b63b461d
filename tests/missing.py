"""Makes packages appear not to be installed during one test."""

import sys

import pytest


def pretend_missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let each import of the package raise ImportError until the test ends.

    That includes modules of it that an earlier test of the process imported: Python looks up the
    whole name first, and would find them without asking for the package.
    """
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
