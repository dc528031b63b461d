"""Prometheus gauges of jobs with problems, computed from the state of the membership core."""

import pytest
from prometheus_client import CollectorRegistry
from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.pulse import Pulses
from shoal_coordinator.membership.model.state import Now
from shoal_coordinator.metrics import JobsCollector
from shoal_coordinator.page.values import job_values

from tests.unit.coordinator.test_membership_scenarios import Story

THREE_RANKS = """\
job min=1 max=4 lease=30000
together
start a host=h1
start b host=h2
start c host=h3
end
"""
ONE_IS_SLOW = "does train a c step=1 busy=0.2\ndoes train b step=1 busy=0.9\nlive 9000\n"
ALL_ARE_QUICK = "does train a b c step=0.25 busy=0.2\nlive 60000\n"
ONE_IS_STUCK = "does wait a c\ndoes work b\nlive 12000\n"


def gauge(text: str, name: str, **labels: str) -> float | None:
    """Returns the gauge's value after the story `text`."""
    story, registry = Story(), CollectorRegistry()
    story.unfold(text)
    now = Now(ms=story.ms, unix_ms=story.ms)
    registry.register(
        JobsCollector(
            lambda: [ObservedJob(state=story.state, pulses=Pulses(members=story.pulses), now=now)]
        )
    )
    return registry.get_sample_value(f"shoal_coordinator_{name}", {"job_id": "digits", **labels})


def test_ranks_that_slow_down_the_others_are_counted_until_they_keep_up() -> None:
    assert gauge(THREE_RANKS, "stragglers") == 0
    # a short slowdown does not count
    assert gauge(THREE_RANKS + ONE_IS_SLOW.replace("9000", "4000"), "stragglers") == 0
    assert gauge(THREE_RANKS + ONE_IS_SLOW, "stragglers") == 1
    assert gauge(THREE_RANKS + ONE_IS_SLOW + ALL_ARE_QUICK, "stragglers") == 0


def test_stalled_step_gauge_is_1_until_steps_end_again() -> None:
    assert gauge(THREE_RANKS + ONE_IS_SLOW, "step_stands") == 0
    assert gauge(THREE_RANKS + ONE_IS_STUCK, "step_stands") == 1
    assert gauge(THREE_RANKS + ONE_IS_STUCK + ALL_ARE_QUICK, "step_stands") == 0


def test_time_without_progress_grows_until_a_rank_reaches_another_step() -> None:
    assert gauge(THREE_RANKS + "does train a b c\nlive 9000\n", "seconds_without_progress") == 0
    all_stand = THREE_RANKS + "does work a b c\nlive 9000\n"
    assert gauge(all_stand, "seconds_without_progress") == 9
    assert gauge(all_stand + "does train b\nlive 10000\n", "seconds_without_progress") == 0
    assert gauge("job min=2 max=2\nstart a\nat 90000\n", "seconds_without_progress") == 0, (
        "a waiting job is not expected to make progress"
    )


def test_job_below_its_minimum_has_a_generation_and_no_ranks() -> None:
    text = "job min=2 max=2\ntogether\nstart a b\nend\n"
    assert (gauge(text, "world_size"), gauge(text, "job_phase", phase="running")) == (2, 1)
    text += "lost b\n"
    assert (
        gauge(text, "world_size"),
        gauge(text, "min_workers"),
        gauge(text, "job_phase", phase="waiting"),
    ) == (0, 2, 1)
    assert (gauge(text, "generation"), gauge(text, "run_generations")) == (1, 1)
    assert gauge(text, "job_phase", phase="running") == 0
    next_run = text + "left a drained\nstop\ncreate\nstart c\n"
    assert (
        gauge(next_run, "run"),
        gauge(next_run, "generation"),
        gauge(next_run, "run_generations"),
    ) == (2, 1, 0)


WITH_BACKUP = (
    "job min=1 max=2 servers=1 backups=1\nserver s0\nserver s1 serves=no\ndeclare "
    "w=10\nbackup-report s0 2 in-sync\n"
)


@pytest.mark.parametrize(
    ("text", "unserved", "unprotected"),
    [
        pytest.param("job min=1 max=2\n", 0, 0, id="a job without servers"),
        pytest.param("job min=1 max=2 servers=2\nserver s0\n", 1, 0, id="one has not come yet"),
        pytest.param(
            "job min=1 max=2 servers=2\nserver s0\nserver s1\ndeclare w=10\nserver-lost s1\n",
            1,
            0,
            id="one is lost",
        ),
        pytest.param(WITH_BACKUP, 0, 0, id="with a backup in sync"),
        pytest.param(
            WITH_BACKUP.replace("backup-report s0 2 in-sync\n", ""),
            0,
            1,
            id="a backup that follows is not in sync yet",
        ),
        pytest.param(WITH_BACKUP + "server-lost s1\n", 0, 1, id="the backup is lost"),
        pytest.param(
            WITH_BACKUP + "server-lost s0\nserver s1\n",
            0,
            1,
            id="the backup has taken the primary's place",
        ),
        pytest.param(WITH_BACKUP + "server-lost s1\nserver-lost s0\n", 1, 0, id="both are lost"),
    ],
)
def test_unserved_and_unprotected_server_places_are_counted(
    text: str, unserved: int, unprotected: int
) -> None:
    assert gauge(text, "server_places_unserved") == unserved
    assert gauge(text, "server_places_unprotected") == unprotected


def test_failed_run_is_reported_until_the_next_one_starts() -> None:
    failed = 'job min=1 max=1\nstart a\nat 5000\nexit a code=1 failure="ValueError"\n'
    assert gauge("job min=1 max=1\nstart a\n", "run_failed_timestamp_seconds") is None
    assert gauge(failed, "run_failed_timestamp_seconds") == 5
    assert gauge(failed + "create\nstart b\n", "run_failed_timestamp_seconds") is None
    assert (
        gauge(
            "job min=1 max=1\nstart a\nat 5000\nleft a finished\n", "run_failed_timestamp_seconds"
        )
        is None
    )


def test_unhealthy_machines_are_counted_by_condition_until_readmitted() -> None:
    assert gauge(THREE_RANKS, "machines", condition="unhealthy") == 0
    two = THREE_RANKS + "machine h2 unhealthy reason=disk\nmachine h3 leaving reason=spot\n"
    assert gauge(two, "machines", condition="unhealthy") == 1
    assert gauge(two, "machines", condition="leaving") == 1
    assert gauge(two, "machines", condition="excluded") == 0
    assert gauge(two + "machine h2 healthy\n", "machines", condition="unhealthy") == 0


def test_page_lists_unhealthy_machines_with_the_reason() -> None:
    story = Story()
    story.unfold(THREE_RANKS + 'at 7000\nmachine h2 unhealthy reason="disk: too slow"\n')
    now = Now(ms=story.ms, unix_ms=story.ms)
    job = ObservedJob(state=story.state, pulses=Pulses(members=story.pulses), now=now)
    assert job_values(job)["machines"] == [
        {
            "host": "h2",
            "condition": "unhealthy",
            "reason": "disk: too slow",
            "since_unix_ms": 7000,
        }
    ]
