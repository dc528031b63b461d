"""The diagnosis of a stalled step names the rank that hangs and the cause, for fifty seeded
scripts (hanging_scripts.py)."""

from __future__ import annotations

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.conftest import Command, Shell
from tests.integration.launch.hanging_scripts import Script, scripts
from tests.zygote.children import Zygote

SIDE_BY_SIDE = 4
"""Number of runs at a time. They wait rather than compute."""
AT_LEAST = 0.95
"""Fraction of scripts whose rank and cause must be right."""
_STALL = re.compile(r"has stalled at step \d+: .*")
_PATIENCE_S = 300.0
_NEXT_LINE_S = 30.0
"""Time after the first diagnosis for another one, which knows more of a silent process."""


def fault_of(script: Script, shell: Shell) -> str:
    """Runs a script. Returns an empty text if its diagnosis is right, otherwise the wrong
    diagnosis."""
    command = shell.start(
        "run",
        "--standalone",
        "--nproc-per-node",
        str(script.ranks),
        shell.script(script.text),
    )
    try:
        return _fault_in(script, command)
    finally:
        command.close()


def _fault_in(script: Script, command: Command) -> str:
    until, diagnosed = time.monotonic() + _PATIENCE_S, False
    text = ""
    while time.monotonic() < until:
        ended = command.process.poll() is not None
        text = command.stderr
        found = _STALL.findall(text)
        if found and not diagnosed:
            diagnosed, until = True, min(until, time.monotonic() + _NEXT_LINE_S)
        if found and script.rank is not None:
            is_right = _is_right(script, found[-1])
        else:  # the run has failed before: the launcher names the first failure
            failed = "" if script.rank is None else rf"rank +: {script.rank} \((.|\n)*"
            is_right = re.search(failed + script.cause, text) is not None
        if is_right:
            return ""
        if ended:
            break
        time.sleep(0.1)
    return text[-1500:] or "no output"


def _is_right(script: Script, diagnosis: str) -> bool:
    """Returns whether a diagnosis blames only the script's rank, quotes its line and names the
    cause."""
    host = re.escape(socket.gethostname())
    _, _, blamed = diagnosis.partition(" for rank ")
    return (
        re.match(rf"{script.rank} \({host}\), ", blamed) is not None
        and re.search(rf"and for rank \d+ \({host}\)", blamed) is None
        and script.line in blamed
        and re.search(script.cause, blamed) is not None
    )


QUICK = ("lock 0.0", "Python's lock 1.0", "data worker 0.0", "diverged 0.0")
"""Scripts whose diagnoses are found in different ways; they run in every test run."""


def test_there_are_fifty_scripts_including_those_of_every_run() -> None:
    names = [script.name for script in scripts()]
    assert len(set(names)) == len(names) >= 50
    assert set(QUICK) <= set(names)


def test_rank_and_cause_are_correct_in_scripts_of_each_path(tmp_path: Path, zygote: Zygote) -> None:
    faults = run([each for each in scripts() if each.name in QUICK], tmp_path, zygote)
    assert not faults, report(faults)


@pytest.mark.matrix
def test_rank_and_cause_are_right_in_nineteen_of_twenty_scripts(
    tmp_path: Path, zygote: Zygote
) -> None:
    only = os.environ.get("SHOAL_TEST_HANGS", "")
    chosen = [each for each in scripts() if re.match(only, each.name)]
    faults = run(chosen, tmp_path, zygote)
    print(f"right: {len(chosen) - len(faults)} of {len(chosen)}\n{report(faults)}")
    assert len(faults) <= (1 - AT_LEAST) * len(chosen), report(faults)


def run(chosen: list[Script], directory: Path, zygote: Zygote) -> dict[str, str]:
    """Runs scripts side by side. Returns the wrong diagnoses by the script's name."""

    def one(script: Script) -> str:
        place = directory / re.sub(r"\W", "-", script.name)
        place.mkdir()
        began = time.monotonic()
        fault = fault_of(script, Shell(place, zygote))
        print(f"{script.name}: {'wrong' if fault else 'right'}, {time.monotonic() - began:.0f} s")
        return fault

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        found = threads.map(one, chosen)
        return {each.name: fault for each, fault in zip(chosen, found, strict=True) if fault}


def report(faults: dict[str, str]) -> str:
    return "\n".join(f"--- {name}:\n{fault}" for name, fault in faults.items())
