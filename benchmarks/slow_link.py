"""Machines with a slow link between them, made of network namespaces of this machine: each has an address of its own, and all that it sends
and receives passes a token bucket (tc tbf) at its port of a switch.

Needs root, `ip` and `tc`. Everything lies in namespaces, so that deleting those leaves nothing behind; they bear the process's id, and
those of processes that are no more (killed before they could clean up) are deleted, with what runs in them, when the next link is made.
Linux alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.errors import MeasurementError

INTERFACE: Final = "eth0"
"""Of each machine."""
_PREFIX: Final = "shoalbench"
_NAME: Final = re.compile(_PREFIX + r"-(\d+)-\w+")
_NETWORK: Final = "10.77.0"
_SWITCH: Final = 254
_BURST: Final = "128kb"
_QUEUE: Final = "50ms"
_TIMEOUT_S: Final = 20


class SlowLink:
    """So many machines at one switch. Use as a context manager."""

    def __init__(self, machines: int, *, mbit_per_s: int) -> None:
        """Raises MeasurementError where namespaces cannot be made."""
        self._machines = machines
        self._rate = f"{mbit_per_s}mbit"
        self._namespaces: list[str] = []

    def __enter__(self) -> Self:
        if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
            raise MeasurementError(f"a slow link needs the programs {', '.join(missing)} (Debian: iproute2)")
        if os.geteuid() != 0:
            raise MeasurementError("a slow link is made of network namespaces, which needs root")
        with contextlib.ExitStack() as undo:
            undo.callback(self._delete)
            _delete_leftovers()
            self._build()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._delete()

    @property
    def switch_address(self) -> str:
        """Where services listen that all machines reach."""
        return f"{_NETWORK}.{_SWITCH}"

    def address(self, machine: int) -> str:
        """Of a machine, from 0."""
        return f"{_NETWORK}.{machine + 1}"

    def on_machine(self, machine: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` there."""
        return ["ip", "netns", "exec", self._name(str(machine)), *command]

    def at_switch(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` at the switch."""
        return ["ip", "netns", "exec", self._name("switch"), *command]

    # --------------------------------------------------------------------------------------------------------------- making

    def _name(self, what: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{what}"

    def _build(self) -> None:
        switch = self._namespace("switch")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "address", "add", f"{self.switch_address}/24", "dev", "br0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for machine in range(self._machines):
            own, port = self._namespace(str(machine)), f"port{machine}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", own)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", own, "address", "add", f"{self.address(machine)}/24", "dev", INTERFACE)
            _ip("-n", own, "link", "set", INTERFACE, "up")
            for namespace, interface in ((own, INTERFACE), (switch, port)):
                shape = ("root", "tbf", "rate", self._rate, "burst", _BURST, "latency", _QUEUE)
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *shape)

    def _namespace(self, what: str) -> str:
        name = self._name(what)
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _delete(self) -> None:
        while self._namespaces:
            _ip("netns", "delete", self._namespaces.pop())


def sent_bytes() -> int:
    """What the machine that this process runs on has sent so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise MeasurementError(f"there is no interface {INTERFACE} here")


def _delete_leftovers() -> None:
    for name in _ip("netns", "list").split():
        owner = _NAME.fullmatch(name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            for process in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if answer.returncode:
        raise MeasurementError(f"{' '.join(command)}: {answer.stderr.strip()}")
    return answer.stdout
