"""What a launcher decides about exits, told as short stories of exits and actions."""

from __future__ import annotations

import signal

import pytest
from shoal.launcher.policy import ELASTIC_RESTARTS, Action, RestartPolicy, WorkerExit
from shoal.launcher.process import ExitStatus

KILLED = ExitStatus.from_returncode(-signal.SIGKILL)
RAISED = ExitStatus.from_returncode(1)
DONE = ExitStatus.from_returncode(0)


def ended(index: int, status: ExitStatus) -> WorkerExit:
    return WorkerExit(index=index, rank=index, pid=1000 + index, status=status, host="here", unix_s=0.0)


def policy(max_restarts: int | None = None) -> RestartPolicy:
    return RestartPolicy(workers=3, max_restarts=max_restarts)


class TestPlainScript:
    def test_a_failure_stops_the_others_and_its_code_is_the_runs(self) -> None:
        story = policy()
        assert story.exited(ended(1, ExitStatus(3)), elastic=False) is Action.STOP
        assert story.exited(ended(0, ExitStatus.from_returncode(-signal.SIGTERM)), elastic=False) is Action.NONE
        assert story.exited(ended(2, DONE), elastic=False) is Action.NONE
        assert story.exit_code == 3

    def test_success_of_all_is_zero(self) -> None:
        story = policy()
        assert [story.exited(ended(index, DONE), elastic=False) for index in range(3)] == [Action.NONE] * 3
        assert story.exit_code == 0

    def test_a_failure_after_others_have_succeeded_still_fails_the_run(self) -> None:
        story = policy()
        story.exited(ended(0, DONE), elastic=False)
        assert story.exited(ended(1, RAISED), elastic=False) is Action.STOP
        assert story.exit_code == 1

    def test_all_are_started_anew_as_often_as_allowed(self) -> None:
        story = policy(max_restarts=2)
        for restart in (1, 2):
            assert story.exited(ended(0, RAISED), elastic=False) is Action.RESTART_ALL
            assert story.restarts == restart
            story.started_all()
        assert story.exited(ended(0, RAISED), elastic=False) is Action.STOP

    def test_a_restart_that_goes_through_makes_the_run_a_success(self) -> None:
        story = policy(max_restarts=1)
        story.exited(ended(2, RAISED), elastic=False)
        story.started_all()
        for index in range(3):
            story.exited(ended(index, DONE), elastic=False)
        assert story.exit_code == 0
        assert [failure.index for failure in story.survived] == [2]

    def test_those_that_fail_of_themselves_while_the_rest_is_stopped_are_told_too(self) -> None:
        story = policy()
        story.exited(ended(1, RAISED), elastic=False)
        story.exited(ended(0, RAISED), elastic=False)
        story.exited(ended(2, ExitStatus.from_returncode(-signal.SIGTERM)), elastic=False)
        assert [failure.index for failure in story.failures] == [1, 0]


class TestElasticScript:
    def test_a_killed_worker_is_replaced_alone(self) -> None:
        story = policy()
        assert story.exited(ended(1, KILLED), elastic=True) is Action.REPLACE
        assert story.replaced(1) == 1
        assert story.replaced(0) == 0

    def test_each_worker_is_replaced_so_often_and_then_the_others_go_on_without(self) -> None:
        story = policy()
        for _ in range(ELASTIC_RESTARTS):
            assert story.exited(ended(1, KILLED), elastic=True) is Action.REPLACE
        assert story.exited(ended(1, KILLED), elastic=True) is Action.NONE
        assert story.exited(ended(2, KILLED), elastic=True) is Action.REPLACE

    def test_a_worker_that_raised_is_not_replaced_unless_asked_for(self) -> None:
        assert policy().exited(ended(0, RAISED), elastic=True) is Action.NONE
        assert policy(max_restarts=1).exited(ended(0, RAISED), elastic=True) is Action.REPLACE

    def test_no_restarts_asked_for_means_none(self) -> None:
        assert policy(max_restarts=0).exited(ended(0, KILLED), elastic=True) is Action.NONE

    def test_a_replacement_that_dies_before_it_joined_is_still_elastic(self) -> None:
        story = policy()
        story.exited(ended(1, KILLED), elastic=True)
        assert story.exited(ended(1, KILLED), elastic=False) is Action.REPLACE

    def test_nobody_joins_a_job_that_is_over(self) -> None:
        assert policy().exited(ended(1, KILLED), elastic=True, over=True) is Action.NONE

    def test_what_the_others_outlive_is_no_failure_of_the_run(self) -> None:
        story = policy(max_restarts=0)
        story.exited(ended(1, KILLED), elastic=True)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(2, DONE), elastic=True)
        assert story.exit_code == 0
        assert [failure.index for failure in story.survived] == [1]

    def test_a_drained_worker_does_not_excuse_what_fails_after_it(self) -> None:
        story = policy(max_restarts=0)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(1, KILLED), elastic=True)
        story.exited(ended(2, RAISED), elastic=True)
        assert story.exit_code == 137


@pytest.mark.parametrize(
    ("returncode", "code", "text"),
    [
        (0, 0, "exit code 0"),
        (7, 7, "exit code 7"),
        (-9, 137, "SIGKILL"),
        (-15, 143, "SIGTERM"),
        (-34, 162, "SIGRTMIN"),
        (-40, 168, "signal 40"),
    ],
)
def test_exit_statuses_are_told_as_shells_do(returncode: int, code: int, text: str) -> None:
    status = ExitStatus.from_returncode(returncode)
    assert (status.code, str(status)) == (code, text)
