"""A process that ends with an uncaught exception writes an error file for its launcher, or exits
with a status that means that it has no bug."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_common.errors import (
    ConfigurationError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_common.exit_status import EVICTED
from shoal_worker.elastic.session.worker_process import is_consequence

from tests.zygote.children import Zygote

SCRIPT = """
from shoal_common.errors import MembershipChanged
from shoal_worker.elastic.session.worker_process import account_for
from shoal_worker.elastic.session.script_end import ScriptEnd
ScriptEnd(account_for).install()
raise {exception}
"""


def ended(zygote: Zygote, exception: str, tmp_path: Path) -> tuple[int, str, Path]:
    """Runs a script that raises the exception. Returns its exit status, its output and the path of
    its error file."""
    account = tmp_path / "account.json"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(exception=exception))
    process = zygote.start(
        "script", [str(script)], output=tmp_path / "log", TORCHELASTIC_ERROR_FILE=str(account)
    )
    return process.wait(), process.said(), account


def test_bug_leaves_an_error_file_in_torchs_format(zygote: Zygote, tmp_path: Path) -> None:
    status, said, account = ended(zygote, "ValueError('a bug')", tmp_path)
    assert (status, "ValueError: a bug" in said) == (1, True)
    content = json.loads(account.read_text())
    assert content["message"]["message"] == "ValueError: a bug"
    assert "ValueError: a bug" in content["message"]["extraInfo"]["py_callstack"]
    assert content["shoal"]["rank"] == -1


def test_failure_raised_later_than_it_happened_is_recorded_at_its_own_time(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The error file contains the time at which a background write failed, not the time at which
    the error was raised. A peer may raise its own error in between."""
    failing = (
        "__import__('shoal_common.errors').errors.UnavailableError('the disk is full', "
        "reason='CHECKPOINT_NOT_WRITTEN')"
    )
    setting = f"(error := {failing}, setattr(error, 'failed_at', 12.5))[0]"
    _, said, account = ended(zygote, setting, tmp_path)
    assert json.loads(account.read_text())["shoal"]["unix_s"] == 12.5, said


def test_peers_death_that_raises_under_user_code_ends_the_process_with_its_own_status(
    zygote: Zygote, tmp_path: Path
) -> None:
    status, said, account = ended(
        zygote,
        "RuntimeError('the step failed') from MembershipChanged('a peer has gone')",
        tmp_path,
    )
    assert (status, "MembershipChanged: a peer has gone" in said) == (EVICTED, True)
    assert not account.exists()


@pytest.mark.parametrize(
    "error",
    [
        MembershipChanged("a peer has gone"),
        UnavailableError("a server has gone"),
        StaleGenerationError("late"),
        PreconditionError("silent for 10 s", reason="LEASE_EXPIRED"),
        PreconditionError("machine h2 is refused", reason="MACHINE_REFUSED"),
    ],
)
def test_failures_of_others_and_evictions_are_not_bugs(error: ShoalError) -> None:
    assert is_consequence(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        ConfigurationError("lr=-1"),
        PreconditionError("all progress is lost", reason="PROGRESS_LOST"),
        UnavailableError("the disk is full", reason="CHECKPOINT_NOT_WRITTEN"),
    ],
)
def test_failure_that_a_replacement_would_repeat_is_a_bug(error: Exception) -> None:
    assert not is_consequence(error)


def test_exception_that_suppresses_its_cause_is_recorded_alone() -> None:
    error = ValueError("a bug")
    error.__context__ = MembershipChanged("a peer has gone")
    assert is_consequence(error)
    error.__suppress_context__ = True  # raise ... from None
    assert not is_consequence(error)


@pytest.mark.parametrize("reason", ["RANKS_DIVERGED", "REPLICAS_DIVERGED"])
def test_script_errors_are_not_consequences_even_if_a_failed_collective_reported_them(
    reason: str,
) -> None:
    verdict = PreconditionError("ranks diverged", reason=reason)
    verdict.__cause__ = MembershipChanged("the group was ended")
    assert not is_consequence(verdict)
    after = RuntimeError("save failed")
    after.__context__ = verdict
    assert not is_consequence(after)
