"""`shoal.ray.run` on a Ray cluster of several nodes, which are killed and added during training."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.clusters.cluster import Service
from shoal.launcher.processes.process import stop_all
from shoal_worker.checkpoint.files import latest, read_checkpoint
from shoal_worker.data.record import audit

from tests.integration.clusters.ray_cluster import RayCluster, eventually

# a node takes up to 20 s to start, and so does finding a place for the rank of a killed node
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[3] / "docs/clusters/ray.md"
TRAINING = """
    import pathlib, shoal, time, torch


    def train(directory):
        directory = pathlib.Path(directory)
        shoal.init()
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer = shoal.as_distributed(
            net, optimizer, strategy="zero2", deterministic=True
        )
        rows = torch.randn(1200, 4, generator=torch.Generator().manual_seed(1))
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(rows), global_batch_size=12, micro_batch_size=2
        )
        for epoch in loader.epochs(3):
            for step in loader.steps():
                for (batch,) in step:
                    model(batch).square().mean().backward()
                if optimizer.step():
                    (directory / f"step-of-{shoal.world_size()}").write_text(
                        str(loader.global_step)
                    )
                optimizer.zero_grad()
                if not (directory / "go").exists():
                    time.sleep(0.2)
        shoal.save_checkpoint(directory / "checkpoints")
        return {name: value.tolist() for name, value in model.full_state_dict().items()}
"""


@pytest.fixture(scope="module")
def cluster(leftover_processes: None) -> Iterator[RayCluster]:
    with RayCluster(nodes=3) as cluster:
        yield cluster


class Driver:
    """A driver process in its own directory, where `training.py` has the function `train`. The
    driver writes its result to a file."""

    def __init__(self, cluster: RayCluster, directory: Path, statements: str) -> None:
        self._cluster = cluster
        self.directory = directory
        directory.mkdir()
        (directory / "training.py").write_text(textwrap.dedent(TRAINING))
        opening = """
            import datetime, json, logging, os, pathlib, shoal, signal
            from training import train
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            HERE = os.getcwd()
            def tell(found):
                pathlib.Path("told.part").write_text(json.dumps(found))
                os.replace("told.part", "told.json")
        """
        (directory / "drive.py").write_text(textwrap.dedent(opening) + textwrap.dedent(statements))
        self.process = cluster.drive(directory / "drive.py")

    @property
    def said(self) -> str:
        return (self.directory / "drive.out").read_text()

    def wait_for(self, file: str) -> None:
        eventually(
            lambda: (self.directory / file).exists() or self.process.poll() is not None,
            lambda: f"{file}; it said: {self.said}",
        )
        assert (self.directory / file).exists(), self.said

    def wait_for_steps_of(self, world: int) -> None:
        """Waits until `world` ranks commit a step after this call."""
        (self.directory / f"step-of-{world}").unlink(missing_ok=True)
        self.wait_for(f"step-of-{world}")

    def release(self) -> None:
        """Lets all further steps run at full speed."""
        (self.directory / "go").touch()

    def end(self) -> int:
        """Waits until the driver has ended and its run has left no process; returns the exit
        status."""
        eventually(
            lambda: self.process.poll() is not None,
            lambda: f"the driver's end; it said: {self.said}",
        )
        self._cluster.wait_until_free()
        return self.process.wait()

    def received(self) -> Any:
        """Waits for the driver to end with status 0; returns its result."""
        assert self.end() == 0, self.said
        return json.loads((self.directory / "told.json").read_text())


@pytest.fixture
def drive(cluster: RayCluster, tmp_path: Path) -> Iterator[Any]:
    drivers: list[Driver] = []

    def start(statements: str, name: str = "run") -> Driver:
        drivers.append(Driver(cluster, tmp_path / name, statements))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait(60)
    cluster.wait_until_free()


def test_killed_node_is_replaced_by_ray_and_the_result_is_unchanged(
    cluster: RayCluster, drive: Any
) -> None:
    statement = """
        environment = {"SHOAL_RECORD_DIR": f"{HERE}/records"}
        tell(shoal.ray.run(train, args=(HERE,), workers=3, environment=environment))
    """
    calm = drive(statement, "calm")
    calm.release()
    expected = calm.received()
    assert set(expected) == {"0", "1", "2"}

    faulty = drive(statement, "faulty")
    faulty.wait_for_steps_of(3)
    cluster.kill_node(1)
    faulty.wait_for_steps_of(2)
    cluster.add_node()
    faulty.wait_for_steps_of(3)
    faulty.release()
    assert faulty.received() == expected, faulty.said
    assert re.search("was lost with .*; Ray (will place it elsewhere|placed it on)", faulty.said), (
        "at once, or after it did not answer"
    )
    for driver in (calm, faulty):
        verdict = audit(driver.directory / "records")
        assert verdict.exactly_once, verdict


@pytest.mark.matrix
def test_workers_above_the_minimum_join_when_ray_has_room(cluster: RayCluster, drive: Any) -> None:
    driver = drive("tell(shoal.ray.run(train, args=(HERE,), workers=(2, 4)))")
    driver.wait_for_steps_of(3)
    cluster.add_node()
    driver.wait_for_steps_of(4)
    driver.release()
    values = driver.received()
    assert set(values) == {"0", "1", "2", "3"}
    assert values["0"] == values["1"] == values["2"] == values["3"]


def test_script_of_the_page_prints_the_return_values_by_rank(
    cluster: RayCluster, tmp_path: Path
) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train_on_ray.py").write_text(script)
    process = cluster.drive(tmp_path / "train_on_ray.py")
    assert process.wait(180) == 0, (tmp_path / "train_on_ray.out").read_text()
    assert re.search(
        r"^\{0: 0\.\d+, 1: 0\.\d+\}$", (tmp_path / "train_on_ray.out").read_text(), re.MULTILINE
    )
    cluster.wait_until_free()


@pytest.mark.matrix
def test_a_script_ends_with_its_own_status(drive: Any) -> None:
    driver = drive("""
        pathlib.Path("script.py").write_text(
            "import os, shoal, sys; shoal.init(); sys.exit(int(sys.argv[1]) * (shoal.rank() == 1))"
        )
        tell([shoal.ray.run("script.py", args=(status,), workers=2) for status in (0, 3)])
    """)
    assert driver.received() == [0, 3], driver.said


ERRORS = """
    import threading


    def fail(number):
        shoal.init()
        if shoal.rank() == 1:
            raise LookupError(f"number {number}")
        signal.pause()  # until its launcher ends it


    def error_of(*arguments, **settings):
        try:
            shoal.ray.run(*arguments, **settings)
        except Exception as error:
            return [
                type(error).__name__,
                getattr(error, "reason", ""),
                str(error),
                *getattr(error, "__notes__", []),
            ]


    soon = datetime.timedelta(seconds=2)
    tell(
        [
            error_of(fail, args=(7,), workers=2),
            error_of(train, resources={"CPU": 64}, placement_timeout=soon),
            error_of(train, args=(threading.Lock(),)),
            error_of(threading.Lock),
            error_of("nowhere.py"),
        ]
    )
"""


@pytest.mark.matrix
def test_each_error_is_reported_once_with_a_remedy(drive: Any) -> None:
    raised, nowhere, not_sent, not_returned, no_script = drive(ERRORS).received()
    assert raised[0] == "LookupError"
    assert raised[2] == "number 7"
    assert "raised by rank 1" in raised[3]
    assert "raise LookupError" in raised[3]
    assert nowhere[:2] == ["DeadlineError", "RESOURCES_UNAVAILABLE"]
    assert re.search(
        r"could not place 1 x CPU 64 \(strategy PACK\) within 2 s .*the cluster has CPU \d, .*add "
        r"nodes",
        nowhere[2],
    )
    assert not_sent[0] == "ConfigurationError"
    assert "cannot pickle the function or its arguments" in not_sent[2]
    assert not_returned[0] == "ConfigurationError"
    assert "cannot pickle the return value of" in not_returned[2]
    assert no_script[0] == "ConfigurationError"
    assert "'nowhere.py'" in no_script[2]


def test_ctrl_c_lets_the_workers_save_and_leaves_nothing_behind(drive: Any) -> None:
    driver = drive("shoal.ray.run(train, args=(HERE,), workers=3)")
    driver.wait_for_steps_of(3)
    driver.process.send_signal(signal.SIGINT)
    assert driver.end() != 0
    assert "KeyboardInterrupt" in driver.said
    found = latest(driver.directory / "checkpoints")
    assert found is not None, driver.said
    read_checkpoint(found)


@pytest.mark.matrix
def test_parameter_servers_have_bundles_of_their_own(drive: Any) -> None:
    driver = drive("""
        def train():
            import torch

            shoal.init()
            net = torch.nn.Linear(4, 2)
            model, optimizer = shoal.as_distributed(
                net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd"
            )
            loader = shoal.ElasticDataLoader(
                torch.utils.data.TensorDataset(torch.ones(48, 4)), batch_size=6
            )
            for epoch in loader.epochs(1):
                for (batch,) in loader:
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return sorted(os.environ)


        tell(shoal.ray.run(train, workers=1, servers=1, server_backups=1))
    """)
    (variables,) = driver.received().values()
    assert "SHOAL_TOKEN" not in variables
    assert "SHOAL_PS_SERVER_TOKEN" not in variables


@pytest.mark.matrix
def test_existing_coordinator_receives_the_drivers_token(
    cluster: RayCluster, drive: Any, tmp_path: Path
) -> None:
    token = secrets.token_hex(8)
    (tmp_path / "tokens").write_text(f"worker: {token}\n")
    service = Service(
        "coordinator",
        "shoal_coordinator",
        ["--tokens", str(tmp_path / "tokens")],
        directory=tmp_path,
        environment=os.environ,
    )
    service.start()
    try:
        service.wait_ready(timedelta(seconds=60))
        driver = drive(f"""
            os.environ["SHOAL_TOKEN"] = {token!r}
            tell(shoal.ray.run(train, args=(HERE,), workers=1, coordinator={service.address!r}))
        """)
        driver.release()
        assert set(driver.received()) == {"0"}
    finally:
        stop_all([service.child], grace=timedelta(seconds=10))
        service.release()
