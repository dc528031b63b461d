"""Pods as processes, without a container engine. Each pod has its own network namespace and a
read-only root directory, runs as the user in its manifest, and has its volumes mounted in their
places.

The root is this machine's, under an overlay: the contents of the images come from this checkout's
environment, and their entry point is where docker/Dockerfile puts it. Services are names in
/etc/hosts. The test restarts pods and runs their probes itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import pytest
from shoal_common.redis.embedded import find_server_binary
from shoal_common.system.processes import tied_to_parent

from benchmarks.machines import Machines, hindrance
from tests.pods import ENTRYPOINT, ROOT, Manifest, Pod

_PATIENCE_S: Final = 120.0
_PROGRAMS: Final = ("nsenter", "unshare", "mount", "chroot")
# $0 is a directory of the pod. The arguments are triples of source, target, and ro or rw for each
# mount; then --; then the command.
_CONTAINER: Final = """
set -eu
root=$0/root
mount -t tmpfs tmpfs "$0/layers"
mkdir "$0/layers/upper" "$0/layers/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/layers/upper,workdir=$0/layers/work" "$root"
for path in $ANCESTORS; do chmod o+rx "$root$path"; done
mkdir -p "$root$(dirname "$ENTRYPOINT")"
install -m 755 "$ENTRYPOINT_FILE" "$root$ENTRYPOINT"
ln -s "$VALKEY" "$root/usr/local/bin/valkey-server"
cp "$HOSTS" "$root/etc/hosts"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
mkdir -p "$root$CHECKOUT"
mount --rbind "$CHECKOUT" "$root$CHECKOUT"
mount -o remount,bind,ro "$root"
echo "$POD" > /proc/sys/kernel/hostname
exec chroot --userspec="$OWNER" "$root" sh -c 'cd "$0" && exec "$@"' "$WORKING_DIRECTORY" "$@"
"""
# A namespace around the container's. The kernel kills its first process, and everything in it, when
# the test run ends. It would not kill the container's first process directly, because that has
# changed its user.
_AROUND: Final = 'unshare --uts --pid --fork --kill-child --mount "$@"; exit $?'


def why_not() -> str | None:
    """Returns why this machine cannot run pods; None: it can."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"it needs the programs {', '.join(missing)} (Debian: util-linux, mount, coreutils)"
    return hindrance()


class RunningPod:
    """A running pod. As in Kubernetes, the container's first process is PID 1 in its own PID
    namespace."""

    def __init__(
        self, pod: Pod, process: subprocess.Popen[bytes], output: Path, network: Path
    ) -> None:
        self.pod = pod
        self.process = process
        self._output = output
        self._network = network

    @property
    def said(self) -> str:
        return self._output.read_text()

    def is_ready(self) -> bool:
        """Runs the readiness probe in the pod's network. Returns whether it succeeded."""
        probe = self.pod.container["readinessProbe"]["httpGet"]
        (port,) = (
            port["containerPort"]
            for port in self.pod.container["ports"]
            if port["name"] == probe["port"]
        )
        check = [
            sys.executable,
            str(ROOT / "docker/healthcheck.py"),
            f"http://127.0.0.1:{port}{probe['path']}",
        ]
        command = ["nsenter", f"--net={self._network}", "--", *check]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() not in (None, 0):
                pytest.fail(
                    f"waited for {what}; {self.pod.name} ({self.process.poll()}) said: {self.said}"
                )
            time.sleep(0.05)

    def delete(self) -> None:
        """Sends SIGTERM to the container's first process, as the kubelet does. `wait` returns the
        exit status."""
        process = psutil.Process(self.process.pid)
        for _ in ("the shell of _AROUND", "its unshare", "the container's first"):
            (process,) = process.children()
        process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the pod as if its machine had been lost."""
        self.process.kill()
        self.process.wait(_PATIENCE_S)

    def wait(self) -> int:
        """Waits for the container and returns its exit status."""
        try:
            return self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.pod.name} did not end; it said: {self.said}")


class Pods:
    """A network of pods, in which each of `names` has an address. A context manager."""

    def __init__(
        self,
        directory: Path,
        names: tuple[str, ...],
        *,
        services: dict[str, str],
        secrets: Path,
        script: Path,
    ) -> None:
        """`services`: names under which other pods reach a pod. `script`: the ConfigMap's
        train.py."""
        self._directory = directory
        self._services = services
        self._secrets = secrets
        self._script = script
        self._machines = Machines(*names)
        self._names = names
        self._running: list[RunningPod] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(self._machines)
            undo.callback(self._stop)
            names = {name: name for name in self._names} | self._services
            lines = [f"{self._machines.address(machine)} {name}" for name, machine in names.items()]
            (self._directory / "hosts").write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _stop(self) -> None:
        for running in self._running:
            running.kill()

    def start(self, pod: Pod) -> RunningPod:
        """Starts a pod's container."""
        directory = self._directory / f"pod-{pod.name}-{len(self._running)}"
        for name in ("root", "layers"):
            (directory / name).mkdir(parents=True)
        security = pod.spec["securityContext"]
        owner = (security["runAsUser"], security["runAsGroup"])
        mounts: list[str] = []
        for number, (path, volume) in enumerate(pod.mounts.items()):
            mounts += [
                str(self._volume(pod, volume, directory / str(number), owner)),
                path,
                "ro" if volume["readOnly"] else "rw",
            ]
        network = self._machines.namespace(pod.name)
        apart = [
            "nsenter",
            f"--net={network}",
            "--",
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            _AROUND,
            "sh",
        ]
        inside = [
            "env",
            "-i",
            *(f"{name}={value}" for name, value in self._environment(pod).items()),
            *pod.command,
        ]
        command = [*apart, "sh", "-c", _CONTAINER, str(directory), *mounts, "--", *inside]
        settings = {
            "ANCESTORS": " ".join(
                str(path) for path in _unreadable_ancestors(Path(sys.base_prefix), ROOT)
            ),
            "CHECKOUT": str(ROOT),
            "ENTRYPOINT": ENTRYPOINT[0],
            "ENTRYPOINT_FILE": str(ROOT / "docker/entrypoint.sh"),
            "HOSTS": str(self._directory / "hosts"),
            "OWNER": "+{}:+{}".format(*owner),
            "POD": pod.name,
            "VALKEY": str(find_server_binary()),
            "WORKING_DIRECTORY": pod.container.get("workingDir", "/"),
        }
        with (directory / "output").open("wb") as output:
            process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **settings},
            )
        running = RunningPod(pod, process, directory / "output", network)
        self._running.append(running)
        return running

    def _environment(self, pod: Pod) -> dict[str, str]:
        """Returns the environment from the image and the manifest."""
        image = {
            "PATH": f"{ROOT / '.venv/bin'}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        return {**image, **pod.environment}

    def _volume(self, pod: Pod, volume: Manifest, made: Path, owner: tuple[int, int]) -> Path:
        """Returns the directory that the kubelet would mount. A claim's directory is reused by the
        next pod with the same claim."""
        if "claim" in volume:
            made = self._directory / f"claim-{pod.name}-{volume['claim']['metadata']['name']}"
        elif "persistentVolumeClaim" in volume:
            made = self._directory / f"claim-{volume['persistentVolumeClaim']['claimName']}"
        made.mkdir(exist_ok=True)
        for item in volume.get("secret", {}).get("items", []):
            shutil.copy(self._secrets / item["key"], made / item["path"])
            os.chown(made / item["path"], 0, owner[1])
            (made / item["path"]).chmod(volume["secret"]["defaultMode"])
        if "configMap" in volume:
            shutil.copy(self._script, made / "train.py")
        os.chown(made, *owner)
        return made


def _unreadable_ancestors(*paths: Path) -> list[Path]:
    """Returns the parent directories that only their owners may enter; the images have none of
    them."""
    above = {parent for path in paths for parent in (path, *path.parents)}
    return sorted(path for path in above if not path.stat().st_mode & 0o001)
