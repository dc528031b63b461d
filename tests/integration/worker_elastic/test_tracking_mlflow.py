"""MLflow contains a run as one MLflow run, whichever rank writes it and however often it is
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.launcher.processes.ports import ReservedPort

from tests.integration.worker_elastic.cluster import cluster
from tests.mlruns import environment, points, runs
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


def test_the_next_rank_goes_on_in_the_same_mlflow_run_when_the_one_that_writes_is_killed(
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
    assert run.data.tags["shoal.newest_event"] == (
        f"step {KILLED + 1}: a fault aborted 1 step(s), which were repeated; generation 2: 2 "
        "ranks, previously 3"
    )
    sizes = points(store, run, "shoal/world_size")
    before = [step for step, size in sizes if size == 3]
    assert before == list(range(1, len(before) + 1)), (
        "what the killed rank had queued for MLflow is missing, and no more"
    )
    assert 1 <= len(before) <= KILLED
    assert [(step, size) for step, size in sizes if step > KILLED] == [
        (step, 2.0) for step in range(KILLED + 1, STEPS + 1)
    ]
    losses = points(store, run, "shoal/loss")
    assert all(loss == step for step, loss in losses)
    assert {step for step, _ in losses} >= set(range(KILLED + 1, STEPS + 1))


def test_a_run_that_goes_on_from_a_checkpoint_goes_on_in_its_mlflow_run(
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
        assert (1 <= written[0] <= 6) if killed else (written[0] > STEPS - 4)
    (run,) = runs(store)
    steps = [step for step, _ in points(store, run, "shoal/world_size")]
    assert steps[-STEPS + 4 :] == list(range(5, STEPS + 1))
    assert steps[: -STEPS + 4] == list(range(1, len(steps) - STEPS + 5)), (
        "with points of the steps that were done again"
    )


def test_a_tracking_server_that_is_away_stops_nobody(zygote: Zygote, tmp_path: Path) -> None:
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
        assert running.said().count("MLflow could not be written to and was dropped") == 1, (
            running.said()
        )
    reserved.close()
