"""compose.yaml started in an engine with podman-compose, as its comments describe.

podman-compose is a separate program (GPL-2.0) that is started and never imported. With podman below
4.6, it does not wait for the health of a service's dependencies. `Cluster.up` does, by running the
health checks of compose.yaml and of the images. podman-compose does not scale down either:
`Cluster.scale_down` stops and removes the containers with the highest numbers, as docker compose
does.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.compose.engine import Engine, EngineError
from tests.compose.images import ROOT, SERVICES

PATIENCE_S: Final = 180.0
SERVERS: Final = ("ps-server-1", "ps-server-2")
# Only Grafana is left out.
_IN_ORDER: Final = (("redis",), ("coordinator",), SERVERS, ("prometheus",), ("worker",))
_PROFILES: Final = ("--profile", "servers", "--profile", "monitoring")
_FETCH: Final = (
    "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], "
    "timeout=5).read().decode())"
)


def copy_of_this_repository(folder: Path) -> Path:
    """Copies the files known to git, with secrets created for the copy, so that no one's secrets
    are touched and scripts can be added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # the file may have been removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    subprocess.run(
        [sys.executable, "docker/make_secrets.py"],
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return folder


class Cluster:
    """The containers of compose.yaml in the copy of the repository in `checkout`, whose images are
    built."""

    def __init__(self, engine: Engine, checkout: Path) -> None:
        self.engine = engine
        self.job = ""
        self._checkout = checkout
        self._script = ""
        self._workers = 0

    def begin(self, job: str, script: str) -> None:
        """Sets the job and the script in examples/ that later calls to `up` run."""
        self.job, self._script = job, script

    def compose(self, *arguments: str) -> str:
        """Runs podman-compose in the folder of compose.yaml."""
        variables = {"SHOAL_JOB": self.job, "SHOAL_SCRIPT": self._script}
        return self.engine.run(
            "podman-compose",
            *_PROFILES,
            *arguments,
            directory=self._checkout,
            environment=variables,
        )

    def up(self, *, workers: int) -> None:
        """Starts the services that do not run and waits until each is healthy. The first time, this
        is done service by service in the order of `depends_on`."""
        self._workers = workers
        everything = tuple(service for services in _IN_ORDER for service in services)
        for services in (everything,) if self.containers() else _IN_ORDER:
            self.compose("up", "--detach", "--no-build", "--scale", f"worker={workers}", *services)
            for name in (name for service in services for name in self.containers(service)):
                self.wait_for(functools.partial(self.is_healthy, name), f"{name} to be healthy")

    def scale_down(self, workers: int) -> list[int]:
        """Scales the job down to this many workers and returns the exit statuses of the removed
        ones."""
        too_many = [f"shoal_worker_{number}" for number in range(workers + 1, self._workers + 1)]
        self._workers = workers
        grace = SERVICES["worker"]["stop_grace_period"].removesuffix("s")
        self.engine.podman("stop", "--time", grace, *too_many)
        statuses = [self.exit_status(name) for name in too_many]
        self.engine.podman("rm", *too_many)
        return statuses

    def kill(self, name: str) -> None:
        """Kills all processes of a container with SIGKILL by `podman kill`. Only `up` starts it
        again."""
        self.engine.podman("kill", name)

    def stop(self) -> dict[str, int]:
        """Stops all services but the workers, which have ended, with SIGTERM. Returns the exit
        status of each."""
        services = [
            service for together in _IN_ORDER for service in together if service != "worker"
        ]
        self.compose("stop", *services)
        return {
            service: self.exit_status(name)
            for service in services
            for name in self.containers(service)
        }

    def down(self) -> None:
        """Removes containers, networks and volumes. Workers are removed first, because
        podman-compose only knows one of them and they use the other resources."""
        for worker in self.containers("worker"):
            self.engine.podman("rm", "--force", "--time", "5", worker)
        self.compose("down", "--volumes", "--timeout", "10")

    def containers(self, service: str = "") -> list[str]:
        """Returns the names of the existing containers, running or not."""
        only = ("--filter", f"label=io.podman.compose.service={service}") if service else ()
        return sorted(self.engine.podman("ps", "--all", *only, "--format", "{{.Names}}").split())

    def is_healthy(self, name: str) -> bool:
        """Returns whether the container's health check succeeds now."""
        try:
            self.engine.podman("healthcheck", "run", name)
        except EngineError:
            return False
        return True

    def is_running(self, name: str) -> bool:
        return (
            self.engine.podman("inspect", "--format", "{{.State.Running}}", name).strip() == "true"
        )

    def exit_status(self, name: str) -> int:
        return int(self.engine.podman("inspect", "--format", "{{.State.ExitCode}}", name))

    def said(self, name: str) -> str:
        """Returns the end of a container's output, or the reason why there is none."""
        try:
            # podman's --tail loses lines that were split
            return self.engine.run("sh", "-c", 'podman logs "$0" 2>&1', name)[-8000:]
        except EngineError as error:
            return str(error)

    def said_by_all(self) -> str:
        """Returns the end of every container's output."""
        return "\n".join(f"--- {name}\n{self.said(name)}" for name in self.containers())

    def status(self) -> dict[str, Any]:
        """Returns the output of `shoal status` with the flags that compose.yaml names."""
        token = (self._checkout / "docker/secrets/viewer_token").read_text()
        command = [
            "shoal",
            "status",
            "--coordinator",
            "localhost:7000",
            "--job",
            self.job,
            "--json",
        ]
        return dict(json.loads(self.engine.run(*command, environment={"SHOAL_TOKEN": token})))

    def prometheus(self, path: str) -> Any:
        """Returns the data of an answer from Prometheus' API at the port that compose.yaml
        publishes."""
        return json.loads(
            self.engine.run(
                sys.executable, "-I", "-c", _FETCH, f"http://127.0.0.1:9090/api/v1/{path}"
            )
        )["data"]

    def volume(self, name: str) -> Path:
        """Returns the path on this machine of one of compose.yaml's volumes."""
        return Path(
            self.engine.podman(
                "volume", "inspect", "--format", "{{.Mountpoint}}", f"shoal_{name}"
            ).strip()
        )

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Returns the first true value of `condition`. An EngineError counts as false."""
        deadline = time.monotonic() + PATIENCE_S
        error: EngineError | None = None
        while True:
            try:
                if found := condition():
                    return found
                error = None
            except EngineError as failed:
                error = failed
            if time.monotonic() > deadline:
                pytest.fail(
                    f"waited {PATIENCE_S:g} s for {what}; {error or ''}\n{self.said_by_all()}"
                )
            time.sleep(0.2)
