"""Simulates machines that are connected to one switch, with network namespaces of this machine.
Each simulated machine has its own name, address and cable.

A cable can be made slow, by a token bucket at both of its ends (tc tbf). The packets from one
machine to another can be dropped without either machine noticing, because they are sent to a
hardware address that no machine has. The network can therefore be cut in one direction only,
between two machines only, or around any set of machines.

Needs Linux, root, `ip` and `tc`. Everything is in namespaces, so deleting them leaves nothing
behind. Their names contain the id of the process that created them. When new namespaces are
created, leftover namespaces of processes that were killed are deleted, together with the processes
in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.errors import MeasurementError

INTERFACE: Final = "eth0"
"""Name of the network interface that each machine has."""
SECOND_INTERFACE: Final = "eth1"
"""Name of the second network interface of machines with two networks."""
_PREFIX: Final = "shoalnet"
_NAME: Final = re.compile(_PREFIX + r"-(\d+)-[\w.-]+")
_SWITCH: Final = " switch"
"""Name of the switch's namespace, which no machine has."""
_NOBODY: Final = "02:00:00:00:ff:ff"
_BURST: Final = "128kb"
_QUEUE: Final = "50ms"
_TIMEOUT_S: Final = 20
# A machine knows its own name, as on a network: `unshare` is of the package that `mount` is of.
# Each program here execs the next.
_NAMED: Final = (
    "unshare",
    "--uts",
    "--",
    "sh",
    "-c",
    'echo "$0" > /proc/sys/kernel/hostname; exec "$@"',
)

_KNOWING: Final = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
"""Mounts a hosts file over /etc/hosts. This affects only the started program, because `ip netns
exec` gives each program its own mount namespace."""


def hindrance() -> str | None:
    """Returns the reason why namespaces cannot be created on this machine; None if they can."""
    if missing := [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]:
        return f"it needs the programs {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "it is made of network namespaces, which needs root"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except MeasurementError as error:
        return f"network namespaces cannot be made: {error}"
    return None


class Machines:
    """Simulated machines that are connected to one switch. A context manager."""

    def __init__(self, *names: str, ipv6: bool = False) -> None:
        """Prepares one machine per name. `ipv6`: True if machines have only IPv6 addresses."""
        self._names = names
        self._ipv6 = ipv6
        self._namespaces: list[str] = []
        self._hosts: dict[str, Path] = {}

    def __enter__(self) -> Self:
        """Creates the machines. Raises MeasurementError if namespaces cannot be created."""
        if (why := hindrance()) is not None:
            raise MeasurementError(f"a network of machines cannot be made here: {why}")
        with contextlib.ExitStack() as undo:
            undo.callback(self._delete)
            _delete_leftovers()
            self._build()
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._delete()

    def address(self, machine: str) -> str:
        """Returns the address at which the other machines reach `machine`."""
        return (
            f"fd77::{self._number(machine):x}" if self._ipv6 else f"10.77.0.{self._number(machine)}"
        )

    def second_address(self, machine: str) -> str:
        """Returns the address of `machine` in its second network, which `connect` creates."""
        return f"10.78.0.{self._number(machine)}"

    def connect(self, *machines: str) -> None:
        """Connects these machines by a second network, in addition to the common one. Its
        interface on each machine is `SECOND_INTERFACE`."""
        switch = self._namespace(_SWITCH)
        _ip("-n", switch, "link", "add", "br1", "type", "bridge")
        _ip("-n", switch, "link", "set", "br1", "up")
        for machine in machines:
            own, port = self._namespace(machine), f"second{self._number(machine)}"
            _ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                SECOND_INTERFACE,
                "netns",
                own,
            )
            _ip("-n", switch, "link", "set", port, "master", "br1", "up")
            _ip(
                "-n",
                own,
                "address",
                "add",
                f"{self.second_address(machine)}/24",
                "dev",
                SECOND_INTERFACE,
            )
            _ip("-n", own, "link", "set", SECOND_INTERFACE, "up")

    def configure(self, machine: str, *command: str) -> None:
        """Runs a program that changes the machine's network, such as `ip route`, on the machine.
        Raises MeasurementError if the program fails."""
        _ip("netns", "exec", self._namespace(machine), *command)

    def on(self, machine: str, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs `command` on the machine. It stays a single process,
        because each program in it replaces the one before."""
        known = (*_KNOWING, str(self._hosts[machine])) if machine in self._hosts else ()
        return ["ip", "netns", "exec", self._namespace(machine), *known, *_NAMED, machine, *command]

    def know_hosts(self, machine: str, hosts: Path) -> None:
        """Makes the file `hosts` appear as /etc/hosts to all processes that are started on the
        machine from now on."""
        self._hosts[machine] = hosts

    def namespace(self, machine: str) -> Path:
        """Returns the file that represents the machine's network, for programs other than `ip`."""
        return Path("/run/netns") / self._namespace(machine)

    def pids(self, machine: str) -> list[int]:
        """Returns the processes on the machine."""
        return [int(pid) for pid in _ip("netns", "pids", self._namespace(machine)).split()]

    def slow_down(self, machine: str, *, mbit_per_s: int) -> None:
        """Limits the rate at which the machine sends and receives to `mbit_per_s`."""
        shape = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", _BURST, "latency", _QUEUE)
        for namespace, interface in self._cable(machine):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *shape)

    def speed_up(self, machine: str) -> None:
        """Removes the limit set by `slow_down`."""
        for namespace, interface in self._cable(machine):
            _run("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")

    def lose(self, sender: str, receiver: str) -> None:
        """Drops everything that `sender` sends to `receiver`; the opposite direction is not
        affected."""
        self._set_station(sender, receiver, _NOBODY)

    def deliver(self, sender: str, receiver: str) -> None:
        """Stops dropping what `sender` sends to `receiver` (`lose`)."""
        self._set_station(sender, receiver, self._station(receiver))

    # --------------------------------------------------------------------------------------- making

    def _number(self, machine: str) -> int:
        return self._names.index(machine) + 1

    def _namespace(self, machine: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{machine.strip()}"

    def _port(self, machine: str) -> str:
        return f"port{self._number(machine)}"

    def _cable(self, machine: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Returns the namespace and the interface of each end of the machine's cable."""
        return (self._namespace(machine), INTERFACE), (
            self._namespace(_SWITCH),
            self._port(machine),
        )

    def _station(self, machine: str) -> str:
        return f"02:00:00:00:00:{self._number(machine):02x}"

    def _set_station(self, sender: str, receiver: str, station: str) -> None:
        entry = (self.address(receiver), "lladdr", station, "dev", INTERFACE, "nud", "permanent")
        _ip("-n", self._namespace(sender), "neighbour", "replace", *entry)

    def _build(self) -> None:
        switch = self._add(_SWITCH)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for machine in self._names:
            own, port = self._add(machine), self._port(machine)
            peer = ("peer", "name", INTERFACE, "address", self._station(machine), "netns", own)
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            length = ("64", "nodad") if self._ipv6 else ("24",)
            _ip(
                "-n",
                own,
                "address",
                "add",
                f"{self.address(machine)}/{length[0]}",
                *length[1:],
                "dev",
                INTERFACE,
            )
            _ip("-n", own, "link", "set", INTERFACE, "up")
        for sender in self._names:
            for receiver in self._names:
                if sender != receiver:
                    self.deliver(sender, receiver)

    def _add(self, machine: str) -> str:
        name = self._namespace(machine)
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _delete(self) -> None:
        while self._namespaces:
            _delete(self._namespaces.pop())


def sent_bytes() -> int:
    """Returns the number of bytes that the simulated machine of this process has sent so far,
    including headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise MeasurementError(f"there is no interface {INTERFACE} here")


def _delete_leftovers() -> None:
    for name in _ip("netns", "list").split():
        owner = _NAME.fullmatch(name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(MeasurementError):  # others that begin now delete it as well
                _delete(name)


def _delete(name: str) -> None:
    """Kills the processes in a namespace, then deletes it. If processes remained, the namespace
    would continue to exist without a name."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (running := _ip("netns", "pids", name).split()) and time.monotonic() < deadline:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)
    _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if answer.returncode:
        raise MeasurementError(f"{' '.join(command)}: {answer.stderr.strip()}")
    return answer.stdout
