"""Errors on the command line name their reason, which can be looked up in
docs/troubleshooting.md."""

from __future__ import annotations

from typing import Any

Shell = Any  # of tests/integration/conftest.py


def test_an_error_ends_with_its_reason(shell: Shell) -> None:
    status, _, received = shell.run("logs", "--job", "nope")
    assert status == 1
    assert received.startswith("shoal: the output of job 'nope' is not stored on this machine")
    assert received.rstrip().endswith("[LOG_UNKNOWN]")


def test_error_whose_class_says_it_all_is_printed_without_a_reason(shell: Shell) -> None:
    status, _, received = shell.run("run", "--standalone", "nowhere.py")
    assert status == 2
    assert received.rstrip().endswith(
        "use -m for a module, or shoal run --no-python for another program"
    )
