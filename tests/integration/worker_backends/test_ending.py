"""A process whose script fails keeps the exit status of that failure, regardless of what Gloo is
doing at that time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import Shell

_WITHOUT_LATE_THREADS = Path(__file__).parents[1] / "programs" / "without_late_threads.py"
_RANK = Path(__file__).with_name("ending_rank.py")
_TIMEOUT_S = 100


@pytest.mark.parametrize("what", ["callback", pytest.param("message", marks=pytest.mark.slow)])
def test_rank_that_raises_during_a_gloo_collective_exits_with_1(what: str, tmp_path: Path) -> None:
    command = [sys.executable, str(_RANK), str(tmp_path / "store"), what]
    with (
        subprocess.Popen(
            [*command, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer,
        subprocess.Popen(
            [*command, "0"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as raising,
    ):
        assert peer.stdout is not None
        assert raising.stderr is not None
        assert peer.stdout.readline() == "waits\n"
        received = ""
        for line in raising.stderr:
            received += line
            if "finalizing" in line:
                break
        assert "finalizing" in received, received
        peer.communicate("", timeout=_TIMEOUT_S)
        received += raising.communicate("", timeout=_TIMEOUT_S)[1]
        status = raising.returncode
    assert status == 1, received


def test_a_script_that_closes_nothing_ends_without_a_traceback(
    shell: Shell,
) -> None:
    code, out, err = shell.run(
        "run", "--standalone", "--no-warm", "--nproc-per-node", "2", _WITHOUT_LATE_THREADS
    )
    assert code == 0, err
    assert out.count("the script has ended") == 2
    assert "Traceback" not in err
    assert "still being destroyed" not in err
