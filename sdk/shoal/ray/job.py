"""Carries out a plan on Ray: starts a coordinator on the driver's machine, places bundles, and runs
their commands.

The coordinator is a child of the driver. When the driver dies, Ray stops everything that the driver
started, so the coordinator does not add a point of failure
(docs/explanation/launcher-and-deployment.md#batch-systems).
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import ray
from ray.util.client import ray as client
from shoal_common.credentials import CallerSettings
from shoal_common.errors import ConfigurationError
from shoal_common.system.scratch import ScratchDirectory

from shoal.launcher.clusters.hosted_coordinator import HostedCoordinator
from shoal.ray.bundles import Bundles
from shoal.ray.command import Command
from shoal.ray.run_plan import Plan
from shoal.ray.supervision import Outcome, Seat, Supervision

_log = logging.getLogger("shoal.ray")
_FOR_PROCESSES = ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Maximum waiting times of a run."""

    placement: timedelta
    """Maximum time for Ray to place launchers."""
    shutdown: timedelta
    """Maximum time for workers to leave after they were asked to."""


def carry_out(plan: Plan, *, coordinator: str | None, patience: Patience) -> Outcome:
    """Carries out a plan. Blocks until the run has ended and all its processes have exited.
    `coordinator`: address (host:port) of a running coordinator; None: starts one."""
    _connect()
    if not plan.files:
        plan = replace(plan, script=(_on_all_machines(plan.script[0]), *plan.script[1:]))
    with ExitStack() as stack:
        hosted = None if coordinator else stack.enter_context(_Hosted(plan.job_id))
        if hosted is not None:
            address, granted = hosted.address, {"SHOAL_TOKEN": hosted.token}
        else:
            assert coordinator is not None
            address, granted = coordinator, _own_credentials()
        _log.info("job %s uses the coordinator %s", plan.job_id, address)
        launcher = plan.launcher(address, secrets=granted)
        servers = (
            [hosted.server(plan, index) for index in range(plan.server_processes)]
            if hosted is not None
            else []
        )
        places = stack.enter_context(Bundles("launcher", plan.resources, strategy=plan.strategy))
        server_places = stack.enter_context(
            Bundles("server", plan.server_resources, strategy="SPREAD")
        )
        if servers:
            server_places.place(len(servers), len(servers), timeout=patience.placement)
        places.place(plan.gang, plan.nodes.most, timeout=patience.placement)
        supervision = Supervision(
            [
                Seat(f"launcher {index}", launcher, actor)
                for index, actor in enumerate(places.actors)
            ],
            [
                Seat(f"parameter server ps-{index}", servers[index], actor)
                for index, actor in enumerate(server_places.actors)
            ],
            tend=hosted.coordinator.keep_up if hosted is not None else lambda: None,
            patience=patience.placement,
        )
        stack.callback(supervision.stop, patience.shutdown)
        return supervision.run()


def _connect() -> None:
    if not ray.is_initialized():
        ray.init()
    if client.is_connected():
        raise ConfigurationError(
            "shoal.ray.run was called over Ray Client (ray://), but the driver must run on a "
            "machine of the cluster; start it with `ray job submit`, or on the head node",
            reason="RAY_CLIENT",
        )


def _on_all_machines(script: str) -> str:
    """Returns a path of the script that is valid on every machine. If the driver has set a
    directory that Ray copies to all machines (working_dir), the path is relative to it; otherwise
    it is the script's path on this machine. Raises ConfigurationError if the script does not
    exist."""
    if ray.get_runtime_context().runtime_env.get("working_dir"):
        return script
    path = Path(script).absolute()
    if not path.is_file():
        raise ConfigurationError(
            f"the script {script!r} does not exist in {Path.cwd()}; use a script that has the "
            "same path on all machines, or pass its directory to Ray with "
            f"ray.init(runtime_env={{'working_dir': ...}})"
        )
    return str(path)


def _own_credentials() -> dict[str, str]:
    """Returns the credentials of this process for the launchers: the token itself, and the paths of
    the certificates."""
    token = CallerSettings.load().bearer_token
    return {
        **({"SHOAL_TOKEN": token} if token else {}),
        **{name: os.environ[name] for name in _FOR_PROCESSES if os.environ.get(name)},
    }


class _Hosted:
    """Coordinator of one run, with the tokens that it accepts."""

    def __init__(self, job_id: str) -> None:
        self.token, self._server_token = secrets.token_hex(24), secrets.token_hex(24)
        self._scratch = ScratchDirectory("ray-coordinator")
        self._tokens = (
            f"worker@{job_id}: {self.token}\nserver@{job_id}: {self._server_token}\n".encode()
        )
        try:
            self._token_file = self._scratch.path / "worker.token"
            self._token_file.write_text(f"{self.token}\n")
            (tokens := self._scratch.path / "tokens").write_bytes(self._tokens)
            self.coordinator = HostedCoordinator(
                self._scratch.path,
                host=ray.util.get_node_ip_address(),
                arguments=["--insecure", "--tokens", str(tokens)],
                environment={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("SHOAL_")
                },
                note=_log.warning,
            )
        except BaseException:
            self._scratch.close()
            raise

    @property
    def address(self) -> str:
        return self.coordinator.address

    def server(self, plan: Plan, index: int) -> Command:
        return plan.server(index, self.address, token=self._server_token, tokens=self._tokens)

    def __enter__(self) -> _Hosted:
        try:
            self.coordinator.start()
        except BaseException:
            self._close()
            raise
        _log.info(
            "to watch this run: shoal status --coordinator %s --token-file %s",
            self.address,
            self._token_file,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        try:
            self.coordinator.close()
        finally:
            self._scratch.close()
