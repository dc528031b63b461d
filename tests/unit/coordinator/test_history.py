"""A job's history covers its newest run as finely as the limit on points allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.pulse import Progress, Pulses
from shoal_coordinator.membership.model.state import Now, RunId
from shoal_coordinator.page.history import Histories, History, Point

from tests.unit.coordinator.test_membership_scenarios import Story

MOST = 600


def point(unix_ms: int, *, step: int = 0) -> Point:
    return Point(unix_ms=unix_ms, step=step, loss=1.0, samples_per_s=8.0, ranks=2)


def test_a_long_run_keeps_its_first_and_its_newest_point_and_even_distances_between() -> None:
    history = History(RunId(number=1))
    for second in range(20_000):
        history.add(point(1000 * second, step=second))
        assert len(history.points) <= MOST
    steps = [each.step for each in history.points]
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert len(steps) > MOST / 4
    assert {later - earlier for earlier, later in pairwise(steps[:-1])} == {64}


def test_returned_history_does_not_change() -> None:
    history = History(RunId(number=1))
    history.add(point(0))
    read = history.points
    history.add(point(1000))
    assert len(read) == 1


def test_job_shows_the_mean_loss_and_speed_of_its_ranks_and_a_new_run_starts_over() -> None:
    story = Story()
    story.unfold("job min=1 max=3\ntogether\nstart a b c\nend\n")
    reported = {
        "a": Progress(step=7, loss=1.0, samples_per_s=10),
        "b": Progress(step=8, loss=3.0, samples_per_s=20),
        "c": Progress(step=8),
    }
    pulses = {
        member: replace(story.pulses[member], progress=progress)
        for member, progress in reported.items()
    }
    jobs: list[ObservedJob] = []
    histories = Histories(lambda: jobs)

    def look(unix_ms: int) -> None:
        jobs[:] = [
            ObservedJob(
                state=story.state, pulses=Pulses(members=pulses), now=Now(ms=0, unix_ms=unix_ms)
            )
        ]
        histories.look()

    look(5_000)
    assert histories.of("digits", story.state.run) == [
        Point(unix_ms=5_000, step=8, loss=2.0, samples_per_s=30, ranks=3)
    ]
    story.unfold("stop\nleft a drained\nleft b drained\nleft c drained\n")
    look(6_000)
    assert len(histories.of("digits", story.state.run)) == 1, "a finished run adds no points"
    first = story.state.run
    story.unfold("create\nstart d\n")
    pulses = dict(story.pulses)
    look(7_000)
    assert histories.of("digits", first) == []
    assert [each.unix_ms for each in histories.of("digits", story.state.run)] == [7_000]
    jobs.clear()
    histories.look()
    assert histories.of("digits", story.state.run) == []
