"""TensorBoard's event files contain a run as one series with each step once, no matter which rank
wrote it and how often the run was interrupted. OpenTelemetry has the spans of every rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.events import points, texts
from tests.integration.worker_elastic.cluster import cluster
from tests.otlp import Receiver, receiver
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "tracked_loop.py"
STEPS = 20
KILLED = 7


def test_next_rank_continues_when_the_writing_one_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    places = {"TRACKED": str(tmp_path / "runs"), "CHECKPOINTS": str(tmp_path / "checkpoints")}
    with (
        receiver() as received,
        cluster(zygote, tmp_path, script=SCRIPT, **places, **received.environment) as running,
    ):
        running.start(0, SHOAL_FAILPOINTS=f"session.after_commit@{KILLED}=kill")
        running.start(1)
        running.start(2)
        for index, worker in running.workers.items():
            assert (worker.wait() == 0) == (index != 0), worker.said()
    sizes = points(tmp_path / "runs", "shoal/world_size")
    assert len(list((tmp_path / "runs").iterdir())) == 2, (
        "a file of the killed rank, and one of the next"
    )
    assert sizes == [(step, 3.0) for step in range(1, KILLED + 1)] + [
        (step, 2.0) for step in range(KILLED + 1, STEPS + 1)
    ]
    losses = points(tmp_path / "runs", "shoal/loss")
    assert all(loss == step for step, loss in losses)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    events = [
        (KILLED + 1, "fault: a fault aborted 1 step(s), which were repeated"),
        (KILLED + 1, "leave: 1 rank(s) left"),
        (KILLED + 1, "generation: generation 2: 2 ranks, previously 3"),
    ]
    assert texts(tmp_path / "runs") == events
    survivors = ("1", "2")
    assert_traced(received, survivors)
    assert sorted(text for name, _, text in received.logs() if name) == sorted(
        text.partition(": ")[2] for _, text in events for _ in survivors
    )


def assert_traced(received: Receiver, survivors: tuple[str, ...]) -> None:
    """Asserts that OpenTelemetry has the spans of each rank, under its host and slot."""
    names: dict[str, Counter[str]] = {}
    for slot, spans in received.spans_by_slot().items():
        names[slot] = Counter(span.name for span in spans)
    assert set(names) >= set(survivors)
    for slot in survivors:
        assert names[slot]["shoal.steps"] == STEPS
        assert names[slot]["shoal.recovery"] == names[slot]["shoal.generation"] == 1
    calls = [name for each in names.values() for name in each if "/" in name]
    assert any(name.startswith("shoal.v1.Coordinator/") for name in calls), names
    assert sum(each["shoal.checkpoint"] for each in names.values()) >= STEPS // 4 - 1
    assert len({resource["shoal.run"] for resource in received.resources()}) == 1


def test_run_resumed_from_a_checkpoint_records_no_step_twice(
    zygote: Zygote, tmp_path: Path
) -> None:
    """All workers are killed two steps after a checkpoint, and new workers redo those two steps."""
    places = {"TRACKED": str(tmp_path / "runs"), "CHECKPOINTS": str(tmp_path / "checkpoints")}
    (tmp_path / "first").mkdir()
    with cluster(zygote, tmp_path / "first", script=SCRIPT, max_workers=2, **places) as running:
        for index in (0, 1):
            running.start(index, SHOAL_FAILPOINTS="session.after_commit@6=kill")
        assert all(worker.wait() != 0 for worker in running.workers.values())
    written = [step for step, _ in points(tmp_path / "runs", "shoal/world_size")]
    assert written in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]), (
        "the script waited for four, and the newest may have been in the queue"
    )
    (tmp_path / "second").mkdir()
    with cluster(zygote, tmp_path / "second", script=SCRIPT, max_workers=3, **places) as running:
        for index in range(3):
            running.start(index)
        assert all(worker.wait() == 0 for worker in running.workers.values()), running.said()
    assert points(tmp_path / "runs", "shoal/world_size") == [(n, 2.0) for n in range(1, 5)] + [
        (n, 3.0) for n in range(5, STEPS + 1)
    ]
    assert points(tmp_path / "runs", "shoal/loss") == [(n, float(n)) for n in range(1, STEPS + 1)]
