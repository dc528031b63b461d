"""MLflow contains a run as one MLflow run, no matter which rank writes it and how often it is
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.launcher.processes.ports import ReservedPort
from shoal_worker.tracking.mlflow import MLflow
from shoal_worker.tracking.sinks import Points, TrackedRun

from tests.integration.worker_elastic.cluster import cluster
from tests.mlruns import EXPERIMENT, environment, points, runs
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "tracked_loop.py"
STEPS = 20
KILLED = 7


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of MLflow's runs, which this process reads too."""
    directory = tmp_path / "mlruns"
    for name, value in environment(directory).items():
        monkeypatch.setenv(name, value)
    return directory


def once(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns points without a repetition of the point that a rank was writing when it was killed:
    unlike a server, a file store may contain that point without the tag with the newest step."""
    kept = [*dict.fromkeys(found)]
    assert len(found) <= len(kept) + 1
    return kept


def test_next_rank_continues_the_mlflow_run_when_the_writing_one_is_killed(
    zygote: Zygote, tmp_path: Path, store: Path
) -> None:
    with cluster(
        zygote,
        tmp_path,
        script=SCRIPT,
        CHECKPOINTS=str(tmp_path / "checkpoints"),
        **environment(store),
    ) as running:
        running.start(0, SHOAL_FAILPOINTS=f"session.after_commit@{KILLED}=kill")
        running.start(1)
        running.start(2)
        for index, worker in running.workers.items():
            assert (worker.wait() == 0) == (index != 0), worker.said()
    (run,) = runs(store)
    assert (run.info.status, run.info.run_name, run.data.tags["shoal.job"]) == (
        "FINISHED",
        "job",
        "job",
    )
    events = f"shoal.event.{KILLED + 1:09d}"
    assert {name: text for name, text in run.data.tags.items() if "event" in name} == {
        f"{events}.fault": "a fault aborted 1 step(s), which were repeated",
        f"{events}.leave": "1 rank(s) left",
        f"{events}.generation": "generation 2: 2 ranks, previously 3",
    }
    assert once(points(store, run, "shoal/world_size")) == [
        (step, 3.0 if step <= KILLED else 2.0) for step in range(1, STEPS + 1)
    ], "the next rank had kept the points that the killed rank had queued"
    losses = points(store, run, "shoal/loss")
    assert all(loss == step for step, loss in losses)
    assert {step for step, _ in losses} >= set(range(KILLED + 1, STEPS + 1))


@pytest.mark.slow
def test_run_resumed_from_a_checkpoint_continues_its_mlflow_run(
    zygote: Zygote, tmp_path: Path, store: Path
) -> None:
    """All workers are killed two steps after a checkpoint, and new workers redo those two steps
    with a new coordinator."""
    places = {"CHECKPOINTS": str(tmp_path / "checkpoints"), **environment(store)}
    for name, killed in (("first", "session.after_commit@6=kill"), ("second", "")):
        (tmp_path / name).mkdir()
        with cluster(zygote, tmp_path / name, script=SCRIPT, max_workers=2, **places) as running:
            for index in (0, 1):
                running.start(index, SHOAL_FAILPOINTS=killed)
            assert all(
                (worker.wait() != 0) == bool(killed) for worker in running.workers.values()
            ), running.said()
        written = [len(points(store, run, "shoal/world_size")) for run in runs(store)]
        assert len(written) == 1
        assert (1 <= written[0] <= 6) if killed else (written[0] >= STEPS - 5)
    (run,) = runs(store)
    steps = [step for step, _ in once(points(store, run, "shoal/world_size"))]
    assert steps == sorted(set(steps)), "each step once"
    assert set(steps) >= {1, *range(7, STEPS + 1)}


def test_run_whose_step_tag_was_being_written_at_a_kill_continues(store: Path) -> None:
    def write(*steps: int) -> None:
        sink = MLflow(EXPERIMENT)
        sink.open(run=TrackedRun(job="job", key="key"), step=0)
        sink.write([Points(step=step, time_ns=step, values={"loss": 1.0}) for step in steps])
        sink.close(ended=True)

    write(1, 2)
    (tag,) = store.glob("*/*/tags/shoal.step")
    tag.write_text("")
    write(2, 3)
    (run,) = runs(store)
    assert [step for step, _ in points(store, run, "loss")] == [1, 2, 3]


def test_absent_tracking_server_stops_nobody(zygote: Zygote, tmp_path: Path) -> None:
    reserved = ReservedPort()
    away = {
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{reserved.port}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with cluster(
        zygote,
        tmp_path,
        script=SCRIPT,
        max_workers=2,
        CHECKPOINTS=str(tmp_path / "checkpoints"),
        **away,
    ) as running:
        running.start(0)
        running.start(1)
        assert [worker.wait() for worker in running.workers.values()] == [0, 0], running.said()
        said = running.said()
        assert said.count("MLflow is not accepting reports") == 1, said
        assert said.count("MLflow did not receive") == 1, said
    reserved.close()
