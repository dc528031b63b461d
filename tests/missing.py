"""Makes packages appear not to be installed during one test."""

import sys

import pytest


def pretend_missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes each import of the package raise ImportError until the test ends.

    This includes modules of the package that an earlier test in this process has imported: Python
    looks up the full name first, and would find them without importing the package.
    """
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
