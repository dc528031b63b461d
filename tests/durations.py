"""Durations of the tests of a run, in out/durations.txt, which `make test` writes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def write_durations(file: Path, reports: Iterable[Sequence[Any]]) -> None:
    """Writes the seconds that each test file and each test took, longest first.

    reports: collected by pytest's terminal reporter; only reports of tests are used.

    Times are wall-clock times including set-up and clean-up. With several processes, the first
    lines show when each of them ran its last test: a process that ends much later than the others
    had a file that should start earlier or be split.
    """
    tests: Counter[str] = Counter()
    files: Counter[str] = Counter()
    begin, ends = time.time(), Counter[str]()
    for report in (each for group in reports for each in group):
        if not isinstance(report, pytest.TestReport) or isinstance(report, pytest.SubtestReport):
            continue
        tests[report.nodeid] += report.duration
        files[report.nodeid.partition("::")[0]] += report.duration
        process = getattr(report, "worker_id", "main")
        ends[process] = max(ends[process], report.stop)
        begin = min(begin, report.start)
    file.parent.mkdir(parents=True, exist_ok=True)
    sections = {
        "last test of each process, since the first test": {
            process: end - begin for process, end in ends.items()
        },
        "files": files,
        "tests": tests,
    }
    file.write_text("".join(_section(title, seconds) for title, seconds in sections.items()))


def _section(title: str, seconds: Mapping[str, float]) -> str:
    rows = sorted(seconds.items(), key=lambda row: (-row[1], row[0]))
    return f"{title} [s]\n" + "".join(f"{each:9.2f} {name}\n" for name, each in rows) + "\n"
