"""The launcher's decisions about worker exits, tested as short stories of exits and actions."""

from __future__ import annotations

import signal

import pytest
from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.workers.policy import (
    ELASTIC_RESTARTS,
    Action,
    JobEnd,
    RestartPolicy,
    WorkerExit,
)
from shoal_common.exit_status import EVICTED, PREEMPTED

KILLED = ExitStatus.from_returncode(-signal.SIGKILL)
RAISED = ExitStatus.from_returncode(1)
DONE = ExitStatus.from_returncode(0)
OUT = ExitStatus(EVICTED)


def ended(index: int, status: ExitStatus, *, unix_s: float = 0.0, message: str = "") -> WorkerExit:
    return WorkerExit(
        index=index,
        rank=index,
        started_as=index,
        pid=1000 + index,
        status=status,
        host="here",
        unix_s=unix_s,
        message=message,
    )


def policy(
    max_restarts: int | None = None, *, fail_fast: bool = True, fail_on_stop: bool = False
) -> RestartPolicy:
    return RestartPolicy(
        workers=3, max_restarts=max_restarts, fail_fast=fail_fast, fail_on_stop=fail_on_stop
    )


class TestPlainScript:
    def test_a_failure_stops_the_others_and_its_code_is_the_runs(self) -> None:
        story = policy()
        assert story.exited(ended(1, ExitStatus(3)), elastic=False) is Action.STOP
        assert (
            story.exited(ended(0, ExitStatus.from_returncode(-signal.SIGTERM)), elastic=False)
            is Action.NONE
        )
        assert story.exited(ended(2, DONE), elastic=False) is Action.NONE
        assert story.exit_code() == 3

    def test_success_of_all_is_zero(self) -> None:
        story = policy()
        assert [story.exited(ended(index, DONE), elastic=False) for index in range(3)] == [
            Action.NONE
        ] * 3
        assert story.exit_code() == 0

    def test_a_failure_after_others_have_succeeded_still_fails_the_run(self) -> None:
        story = policy()
        story.exited(ended(0, DONE), elastic=False)
        assert story.exited(ended(1, RAISED), elastic=False) is Action.STOP
        assert story.exit_code() == 1

    def test_all_are_restarted_as_often_as_allowed(self) -> None:
        story = policy(max_restarts=2)
        for restart in (1, 2):
            assert story.exited(ended(0, RAISED), elastic=False) is Action.RESTART_ALL
            assert story.restarts == restart
            story.started_all()
        assert story.exited(ended(0, RAISED), elastic=False) is Action.STOP

    def test_successful_restart_makes_the_run_a_success(self) -> None:
        story = policy(max_restarts=1)
        story.exited(ended(2, RAISED), elastic=False)
        story.started_all()
        for index in range(3):
            story.exited(ended(index, DONE), elastic=False)
        assert story.exit_code() == 0
        assert [failure.index for failure in story.survived] == [2]

    def test_independent_failures_while_the_rest_is_stopped_are_reported_too(self) -> None:
        story = policy()
        story.exited(ended(1, RAISED), elastic=False)
        story.exited(ended(0, RAISED), elastic=False)
        story.exited(ended(2, ExitStatus.from_returncode(-signal.SIGTERM)), elastic=False)
        assert [failure.index for failure in story.failures] == [1, 0]


class TestElasticScript:
    def test_killed_worker_alone_is_replaced(self) -> None:
        story = policy()
        assert story.exited(ended(1, KILLED), elastic=True) is Action.REPLACE
        assert story.replaced(1) == 1
        assert story.replaced(0) == 0

    def test_evicted_worker_is_replaced_like_a_killed_one(self) -> None:
        story = policy()
        assert story.exited(ended(1, OUT), elastic=True) is Action.REPLACE
        assert policy(max_restarts=0).exited(ended(1, OUT), elastic=True) is Action.NONE

    def test_each_worker_is_replaced_up_to_the_limit_and_then_the_others_continue_without_it(
        self,
    ) -> None:
        story = policy()
        for _ in range(ELASTIC_RESTARTS):
            assert story.exited(ended(1, KILLED), elastic=True) is Action.REPLACE
        assert story.exited(ended(1, KILLED), elastic=True) is Action.NONE
        assert story.exited(ended(2, KILLED), elastic=True) is Action.REPLACE

    def test_no_restarts_allowed_means_no_replacement(self) -> None:
        assert policy(max_restarts=0).exited(ended(0, KILLED), elastic=True) is Action.NONE

    def test_replacement_that_dies_before_joining_is_replaced_too(self) -> None:
        story = policy()
        story.exited(ended(1, KILLED), elastic=True)
        assert story.exited(ended(1, KILLED), elastic=False) is Action.REPLACE

    @pytest.mark.parametrize("end", [JobEnd.COMPLETED, JobEnd.STOPPED, JobEnd.FAILED])
    def test_finished_job_accepts_no_replacement(self, end: JobEnd) -> None:
        story = policy()
        story.heard(end)
        assert story.exited(ended(1, KILLED), elastic=True) is Action.NONE

    def test_failure_survived_by_the_others_does_not_fail_the_run(self) -> None:
        story = policy(max_restarts=0)
        story.exited(ended(1, KILLED), elastic=True)
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(2, DONE), elastic=True)
        assert story.exit_code() == 0
        assert [failure.index for failure in story.survived] == [1]

    def test_worker_killed_after_the_others_finished_does_not_fail_the_run(
        self,
    ) -> None:
        story = policy()
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(1, KILLED), elastic=True)
        assert story.failures == []
        assert [failure.index for failure in story.survived] == [1]

    def test_drained_worker_does_not_excuse_a_later_failure(self) -> None:
        story = policy(max_restarts=0)
        story.heard(JobEnd.NONE)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(1, KILLED), elastic=True)
        story.exited(ended(2, KILLED), elastic=True)
        assert story.exit_code() == 137


class TestAnElasticWorkerThatRaised:
    def test_ends_the_job_with_its_code(self) -> None:
        story = policy()
        assert story.exited(ended(1, ExitStatus(3)), elastic=True) is Action.STOP
        assert story.fails_job
        story.exited(ended(0, DONE), elastic=True)
        story.heard(JobEnd.FAILED)
        assert story.exit_code() == 3

    def test_is_replaced_up_to_max_restarts_times_and_then_ends_the_job(self) -> None:
        story = policy(max_restarts=2)
        assert [story.exited(ended(1, RAISED), elastic=True) for _ in range(3)] == [
            Action.REPLACE,
            Action.REPLACE,
            Action.STOP,
        ]

    def test_is_excused_by_a_replacement_that_finishes(self) -> None:
        story = policy(max_restarts=1)
        story.exited(ended(1, RAISED), elastic=True)
        story.heard(JobEnd.COMPLETED)
        for index in range(3):
            story.exited(ended(index, DONE), elastic=True)
        assert story.exit_code() == 0
        assert [failure.index for failure in story.survived] == [1]

    def test_is_not_excused_when_the_others_may_continue_without_it(self) -> None:
        story = policy(fail_fast=False)
        assert story.exited(ended(1, ExitStatus(3)), elastic=True) is Action.NONE
        assert not story.fails_job
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        story.exited(ended(2, DONE), elastic=True)
        assert story.exit_code() == 3
        assert [failure.index for failure in story.failures] == [1]

    def test_fails_the_run_even_if_another_worker_has_finished_before(self) -> None:
        story = policy()
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        assert story.exited(ended(1, RAISED), elastic=True) is Action.NONE, (
            "the other workers are about to end by themselves"
        )
        assert story.fails_job
        story.exited(ended(2, DONE), elastic=True)
        assert story.exit_code() == 1

    def test_is_recognized_by_its_error_file_whatever_ended_the_process(self) -> None:
        aborted = ended(1, ExitStatus.from_returncode(-signal.SIGABRT), message="ValueError: a bug")
        story = policy()
        assert story.exited(aborted, elastic=True) is Action.STOP
        assert story.exit_code() == 134

    def test_precedes_its_consequences_and_an_excused_one_is_not_the_cause(
        self,
    ) -> None:
        story = policy()
        story.exited(ended(0, KILLED, unix_s=1.0), elastic=True)
        story.exited(
            ended(1, RAISED, unix_s=8.0, message="RuntimeError: Connection closed by peer"),
            elastic=True,
        )
        story.exited(ended(0, OUT, unix_s=6.0), elastic=True)
        story.exited(ended(2, ExitStatus(7), unix_s=7.0, message="ValueError: a bug"), elastic=True)
        assert [failure.index for failure in story.failures] == [2, 1, 0]
        assert [failure.unix_s for failure in story.survived] == [1.0]


class TestKnownJobOutcome:
    def test_worker_that_left_on_request_may_report_it_by_its_status(self) -> None:
        story = policy()
        assert story.exited(ended(1, ExitStatus(PREEMPTED)), elastic=True) is Action.NONE
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        assert (story.exit_code(), story.failures, story.survived) == (0, [], [])

    def test_job_is_not_over_when_all_workers_were_asked_to_leave(self) -> None:
        story = policy()
        story.heard(JobEnd.NONE)
        for index in range(3):
            story.exited(ended(index, DONE), elastic=True)
        assert story.exit_code() == EVICTED

    def test_unreachable_coordinator_does_not_make_the_run_a_success(self) -> None:
        story = policy()
        for index in range(3):
            story.exited(ended(index, DONE), elastic=True)
        assert story.exit_code() == EVICTED

    def test_finished_worker_proves_the_end_without_the_coordinator(self) -> None:
        story = policy()
        story.finished()
        for index in range(3):
            story.exited(ended(index, DONE), elastic=True)
        assert story.exit_code() == 0

    def test_finished_job_stays_finished_when_the_coordinator_loses_its_data(self) -> None:
        story = policy()
        story.heard(JobEnd.COMPLETED)
        story.heard(JobEnd.NONE)
        story.heard(JobEnd.UNKNOWN)
        story.exited(ended(0, DONE), elastic=True)
        assert story.exit_code() == 0

    def test_a_failure_on_another_machine_fails_the_run_here(self) -> None:
        story = policy()
        story.exited(ended(0, DONE), elastic=True)
        story.heard(JobEnd.FAILED)
        assert story.exit_code() == 1

    @pytest.mark.parametrize("end", [JobEnd.NONE, JobEnd.UNKNOWN, JobEnd.STOPPED])
    def test_unfinished_run_that_was_asked_to_end_names_the_signal(self, end: JobEnd) -> None:
        story = policy()
        story.joined()
        story.heard(end)
        story.stopping()
        story.exited(ended(0, DONE), elastic=True)
        assert story.exit_code(signal_number=signal.SIGTERM) == PREEMPTED

    def test_run_asked_to_end_that_finished_anyway_is_a_success(self) -> None:
        story = policy()
        story.stopping()
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        assert story.exit_code(signal_number=signal.SIGTERM) == 0


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
def test_exit_statuses_follow_the_convention_of_shells(
    returncode: int, code: int, text: str
) -> None:
    status = ExitStatus.from_returncode(returncode)
    assert (status.code, str(status)) == (code, text)


class TestStoppedJob:
    @pytest.mark.parametrize(("fail_on_stop", "code"), [(False, 0), (True, EVICTED)])
    def test_stopped_job_is_unfinished_only_if_the_flag_says_so(
        self, fail_on_stop: bool, code: int
    ) -> None:
        story = policy(fail_on_stop=fail_on_stop)
        story.heard(JobEnd.STOPPED)
        for index in range(3):
            assert story.exited(ended(index, DONE), elastic=True) is Action.NONE
        assert story.was_stopped
        assert story.exit_code() == code

    def test_flag_does_not_affect_a_completed_job(self) -> None:
        story = policy(fail_on_stop=True)
        story.heard(JobEnd.COMPLETED)
        story.exited(ended(0, DONE), elastic=True)
        assert not story.was_stopped
        assert story.exit_code() == 0

    def test_worker_that_raised_outweighs_the_stop(self) -> None:
        story = policy()
        story.exited(ended(0, RAISED), elastic=True)
        story.heard(JobEnd.STOPPED)
        assert not story.was_stopped
        assert story.exit_code() == 1


@pytest.mark.parametrize("status", [KILLED, OUT, RAISED])
def test_job_continues_without_replacing_workers_on_a_refused_machine(
    status: ExitStatus,
) -> None:
    decided = policy(max_restarts=9)
    decided.heard(JobEnd.NONE)
    assert decided.exited(ended(0, status), elastic=True) is Action.REPLACE
    decided.refused = "its workers died 4 times"
    assert decided.exited(ended(0, status), elastic=True) is Action.NONE
    assert not decided.fails_job
    assert decided.exit_code() == EVICTED
    decided.heard(JobEnd.COMPLETED)
    assert decided.exit_code() == 0
