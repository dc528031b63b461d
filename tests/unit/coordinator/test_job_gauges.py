"""What Prometheus is told of a job that does not go on as it should: gauges read from the state that the membership core is in."""

from prometheus_client import CollectorRegistry
from shoal_coordinator.metrics import JobsCollector

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


def gauge(text: str, name: str) -> float | None:
    """Its value after what `text` tells."""
    story, registry = Story(), CollectorRegistry()
    story.unfold(text)
    registry.register(JobsCollector(lambda: [story.state]))
    return registry.get_sample_value(f"shoal_coordinator_{name}", {"job_id": "digits"})


def test_ranks_that_hold_the_others_back_are_counted_until_they_keep_up() -> None:
    assert gauge(THREE_RANKS, "stragglers") == 0
    assert gauge(THREE_RANKS + ONE_IS_SLOW.replace("9000", "4000"), "stragglers") == 0  # it may be a moment's
    assert gauge(THREE_RANKS + ONE_IS_SLOW, "stragglers") == 1
    assert gauge(THREE_RANKS + ONE_IS_SLOW + ALL_ARE_QUICK, "stragglers") == 0


def test_a_step_that_stands_is_1_until_steps_end_again() -> None:
    assert gauge(THREE_RANKS + ONE_IS_SLOW, "step_stands") == 0
    assert gauge(THREE_RANKS + ONE_IS_STUCK, "step_stands") == 1
    assert gauge(THREE_RANKS + ONE_IS_STUCK + ALL_ARE_QUICK, "step_stands") == 0
