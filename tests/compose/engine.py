"""podman in its own namespaces, so that a test's containers do not interact with this machine and
leave nothing on it.

The engine has its own process, mount and network namespaces. Published ports cannot collide, and
firewall rules and bridges belong to the namespace. When its first process ends, which the kernel
kills with the test run, all containers are dead. All its storage is in one folder. It has no
systemd, which elsewhere runs the containers' health checks, so the tests run them.

Images are built on this machine's network, because pip needs it. Containers have no access to other
networks.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from shoal_common.system.processes import tied_to_parent

_START_S: Final = 30.0
_COMMAND_S: Final = 120.0
_PROGRAMS: Final = (
    "podman",
    "runc",
    "mmdebstrap",
    "iptables",
    "ip",
    "nsenter",
    "unshare",
    "prometheus",
)
_PACKAGES: Final = (
    "podman, runc, netavark, aardvark-dns, catatonit, mmdebstrap, iptables, "
    "iproute2, util-linux, prometheus"
)

# $0 is the engine's folder. Orphaned processes are reaped by the kernel, because the first process
# ignores SIGCHLD.
_FIRST_PROCESS: Final = """
set -eu
resolver=$(realpath /etc/resolv.conf)
cp "$resolver" "$0/resolv.conf"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
[ -e "$resolver" ] || { mkdir -p "$(dirname "$resolver")" && cp "$0/resolv.conf" "$resolver"; }
mkdir -p /run/lock
ip link set lo up
touch "$0/ready"
exec python3 -c 'import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True: signal.pause()'
"""
_CONTAINERS: Final = """
[containers]
default_ulimits = [{ulimits}]
log_driver = "k8s-file"

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
tmp_dir = "/run/libpod"

[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
_STORAGE: Final = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "/run/containers/storage"
"""
_REGISTRIES: Final = """
unqualified-search-registries = ["docker.io"]
short-name-mode = "permissive"
"""


class EngineError(Exception):
    """A request to the engine failed. The message is the engine's."""


def why_not() -> str | None:
    """Returns why no engine can be tried here, or None. Whether containers start is only found out
    by trying."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"the programs {', '.join(missing)} are not on PATH (Debian: {_PACKAGES})"
    if os.geteuid() != 0:
        return "its namespaces need root"
    return None


class Engine:
    """A podman that stores everything in `folder`. As a context manager, it leaves neither a
    process nor the folder's contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._first = 0
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SHOAL_", "PET_", "COMPOSE_"))
            },
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "BUILDAH_FORMAT": "docker",  # the OCI format has no HEALTHCHECK
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "DISABLE_HC_SYSTEMD": "true",
            "TMPDIR": str(folder / "tmp"),
        }

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a run that was killed
            (self.folder / "tmp").mkdir(parents=True)
            self._configure()
            command = [
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                _FIRST_PROCESS,
            ]
            log = undo.enter_context((self.folder / "log").open("wb"))
            around = subprocess.Popen(
                tied_to_parent([*command, str(self.folder)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            undo.callback(_end, around)
            self._await_first_process(around)
            undo.callback(self._remove_containers)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _remove_containers(self) -> None:
        """Ends all containers one by one. If they ended with the first process of their namespace,
        they would leave control groups behind."""
        with suppress(EngineError):
            self.podman("rm", "--all", "--force", "--time", "1")

    def _configure(self) -> None:
        """Writes the configuration. It passes this process's limits on to containers, because
        podman would otherwise try to raise them."""
        limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
        known = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
        ulimits = ", ".join(
            f'"{name}={limit}:{limit}"'
            for name, limit in known.items()
            if limit != resource.RLIM_INFINITY
        )
        (self.folder / "containers.conf").write_text(
            _CONTAINERS.format(folder=self.folder, ulimits=ulimits)
        )
        (self.folder / "storage.conf").write_text(_STORAGE.format(folder=self.folder))
        (self.folder / "registries.conf").write_text(_REGISTRIES)

    def _await_first_process(self, around: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_S
        while not (self.folder / "ready").exists():
            if around.poll() is not None or time.monotonic() > deadline:
                raise EngineError(
                    "namespaces cannot be made: "
                    f"{(self.folder / 'log').read_text(errors='replace')}"
                )
            time.sleep(0.05)
        (first,) = psutil.Process(around.pid).children()
        self._first = first.pid

    def run(
        self,
        *command: str,
        online: bool = False,
        directory: Path | None = None,
        environment: dict[str, str] | None = None,
        timeout_s: float = _COMMAND_S,
    ) -> str:
        """Runs a program of this machine in the engine's namespaces and returns its output.
        `online`: True for this machine's network.

        Raises:
            EngineError: it failed, or took longer than `timeout_s`.
        """
        namespaces = ["--mount", "--pid"] if online else ["--mount", "--pid", "--net"]
        entered = [
            "nsenter",
            "--target",
            str(self._first),
            *namespaces,
            f"--wd={directory or Path.cwd()}",
            "--",
            *command,
        ]
        try:
            ended = subprocess.run(
                tied_to_parent(entered),
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                start_new_session=True,  # a build that finds a terminal suspends itself
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = b"".join(
                part if isinstance(part, bytes) else part.encode()
                for part in (error.stdout, error.stderr)
                if part
            )
            raise EngineError(
                f"{' '.join(command[:4])} did not end in {timeout_s:g} s: "
                f"{said.decode(errors='replace')[-3000:]}"
            ) from None
        if ended.returncode != 0:
            raise EngineError(
                f"{' '.join(command)}: exit status {ended.returncode}: "
                f"{(ended.stdout + ended.stderr)[-6000:]}"
            )
        return ended.stdout

    def podman(self, *arguments: str, online: bool = False, timeout_s: float = _COMMAND_S) -> str:
        """Runs podman and returns its output."""
        return self.run("podman", *arguments, online=online, timeout_s=timeout_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
