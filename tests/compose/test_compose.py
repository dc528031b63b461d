"""compose.yaml in containers: a cluster starts, loses every part that it can lose, grows and
shrinks, and trains each sample as often as it should.

docker/Dockerfile and compose.yaml are used unchanged, except for Grafana, whose program is not
available here: `make verify` checks its configuration. The tests are skipped, with the reason, if
podman starts no container.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import shoal
from shoal_worker.checkpoint.files import latest

from tests.compose.cluster import SERVERS, Cluster, copy_of_this_repository
from tests.compose.engine import Engine, EngineError, why_not
from tests.compose.images import ROOT, build, make_base, stand_in

pytestmark = pytest.mark.timeout(1800)

_OUT: Final = ROOT / "out/compose"
_SCRIPT: Final = Path(__file__).with_name("counting.py")
_BATCH: Final = 8


@pytest.fixture(scope="module")
def engine(leftover_processes: None) -> Iterator[Engine]:
    """A podman that has the base of all images. Tests that use it are skipped if podman cannot run,
    with the reason."""
    if (why := why_not()) is not None:
        pytest.skip(f"containers cannot run here: {why}")
    with Engine(_OUT / "engine") as started:
        try:
            make_base(started, _OUT)
        except EngineError as error:
            pytest.skip(f"containers cannot run here: {error}")
        yield started


@pytest.fixture(scope="module")
def checkout(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository with built images and a script for each tested strategy."""
    folder = copy_of_this_repository(tmp_path_factory.mktemp("checkout"))
    for strategy in ("ddp", "async_sgd"):
        shutil.copy(_SCRIPT, folder / f"examples/{strategy}.py")
    stand_in(engine)
    build(engine, folder)
    return folder


@pytest.fixture
def cluster(engine: Engine, checkout: Path) -> Iterator[Cluster]:
    made = Cluster(engine, checkout)
    yield made
    made.down()
    left = {
        kind: engine.podman(kind, "ls", "--format", "{{.Name}}").split()
        for kind in ("volume", "network")
    }
    assert (made.containers(), left) == ([], {"volume": [], "network": ["podman"]})


class Walk:
    """One test: actions on a cluster and the expected results."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def trains_on(self, workers: int) -> int:
        """Waits until a generation of this many workers takes steps. Returns its number."""

        def taken() -> int:
            status = self.cluster.status()
            steps = [
                member["step"] or 0 for member in status["members"] if member["rank"] is not None
            ]
            return (
                min(steps)
                if (status["phase"], status["world_size"], len(steps))
                == ("running", workers, workers)
                else 0
            )

        began = self.cluster.wait_for(taken, f"{workers} workers to train")
        self.cluster.wait_for(
            lambda: taken() > began + 1, f"{workers} workers to continue training"
        )
        return int(self.cluster.status()["generation"])

    def prometheus_scrapes(self, workers: int) -> None:
        """Waits until the coordinator, this many workers and both servers are targets and up."""
        expected = sorted(["coordinator", *(["worker"] * workers), *(["server"] * len(SERVERS))])

        def targets() -> list[tuple[str, str]]:
            active = self.cluster.prometheus("targets?state=active")["activeTargets"]
            return sorted(
                (target["labels"].get("role", "coordinator"), target["health"]) for target in active
            )

        self.cluster.wait_for(
            lambda: targets() == [(role, "up") for role in expected],
            f"Prometheus to scrape {expected}",
        )

    def alert_is(self, name: str, state: str) -> None:
        """Waits until an alert rule is in this state."""

        def current() -> str:
            groups = self.cluster.prometheus("rules?type=alert")["groups"]
            return next(
                str(rule["state"])
                for group in groups
                for rule in group["rules"]
                if rule["name"] == name
            )

        self.cluster.wait_for(lambda: current() == state, f"the alert {name} to be {state}")

    def steps_by_prometheus(self) -> float:
        """Returns the number of steps that the workers have committed as last scraped, or 0."""
        result = self.cluster.prometheus("query?query=max(shoal_worker_steps_committed_total)")[
            "result"
        ]
        return float(result[0]["value"][1]) if result else 0.0

    def folder(self) -> Path:
        """Returns the job's folder in the volume that workers write to."""
        return self.cluster.volume("checkpoints") / self.cluster.job

    def finish(self, workers: int) -> None:
        """Speeds up the steps and waits until all workers have ended successfully. Checks that each
        sample was trained on once per epoch."""
        (self.folder() / "go").touch()
        names = self.cluster.containers("worker")
        self.cluster.wait_for(
            lambda: not any(self.cluster.is_running(name) for name in names),
            "the workers to end",
        )
        assert [self.cluster.exit_status(name) for name in names] == [0] * workers, "\n".join(
            map(self.cluster.said, names)
        )
        reports = [json.loads(path.read_text()) for path in self.folder().glob("counted-*.json")]
        assert len(reports) == workers
        for each in reports:
            assert each["counts"] == pytest.approx([each["epochs"]] * len(each["counts"]), abs=0.01)
        assert self.cluster.status()["ending"] == "completed"


def test_container_cluster_trains_each_sample_once_despite_kills(cluster: Cluster) -> None:
    walk = Walk(cluster)
    cluster.begin("train", "ddp.py")
    cluster.up(workers=4)
    walk.trains_on(4)
    walk.prometheus_scrapes(workers=4)

    cluster.kill("shoal_worker_2")
    walk.trains_on(3)
    cluster.up(workers=4)
    generation = walk.trains_on(4)

    saved = cluster.wait_for(
        lambda: (walk.folder() / "saved").is_dir() and latest(walk.folder() / "saved"),
        "a checkpoint",
    )
    counted = -shoal.load_full_state(saved)["weight"]
    assert counted.sum().item() == pytest.approx(
        int(saved.name.removeprefix("step-")) * _BATCH, abs=0.1
    )

    cluster.kill("shoal_coordinator_1")
    walk.alert_is("CoordinatorAway", "firing")
    before = walk.steps_by_prometheus()
    cluster.wait_for(
        lambda: walk.steps_by_prometheus() > before > 0,
        "training to continue without the coordinator",
    )
    cluster.up(workers=4)
    assert walk.trains_on(4) == generation, (
        f"the coordinator's restart must not change the membership:\n{cluster.said_by_all()}"
    )
    walk.alert_is("CoordinatorAway", "inactive")

    cluster.up(workers=5)
    walk.trains_on(5)
    walk.prometheus_scrapes(workers=5)
    assert cluster.scale_down(3) == [143, 143]
    walk.trains_on(3)
    walk.finish(workers=3)

    cluster.begin("second", "async_sgd.py")
    cluster.up(workers=3)
    walk.trains_on(3)
    cluster.kill("shoal_ps-server-1_1")
    cluster.wait_for(
        lambda: [server["alive"] for server in cluster.status()["servers"]].count(False) == 1,
        "the coordinator to notice the loss of the server",
    )
    cluster.up(workers=3)
    walk.trains_on(3)
    walk.finish(workers=3)
    assert cluster.stop() == {
        "redis": 0,
        "coordinator": 0,
        "prometheus": 0,
        **dict.fromkeys(SERVERS, 0),
    }


def test_second_cluster_starts_from_nothing_and_stops_cleanly(cluster: Cluster) -> None:
    walk = Walk(cluster)
    cluster.begin("train", "ddp.py")
    cluster.up(workers=4)
    walk.trains_on(4)
    cluster.kill("shoal_worker_2")
    walk.trains_on(3)
    cluster.up(workers=4)
    walk.trains_on(4)
    walk.finish(workers=4)
    assert cluster.stop() == {
        "redis": 0,
        "coordinator": 0,
        "prometheus": 0,
        **dict.fromkeys(SERVERS, 0),
    }
