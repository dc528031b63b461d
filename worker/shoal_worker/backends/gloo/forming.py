"""Connects the ranks of one Gloo group, in an attempt that can be abandoned.

Gloo's constructor blocks until all peers are connected and cannot be interrupted, so it runs in its
own thread. If the attempt is abandoned, a waiting caller continues immediately; the thread ends
within the connect timeout and drops its result. This module does not depend on collectives.

Threads: one thread creates, starts and waits for a `FormingGroup`; any thread may call `give_up`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError, InternalError, ShoalError
from shoal_common.settings import Address
from shoal_common.system.own_address import REACHED_ELSEWHERE
from torch.distributed.distributed_c10d import GroupName, PrefixStore, ProcessGroupGloo, Store

from shoal_worker.backends.base import GroupEndedError, cause_of
from shoal_worker.backends.gloo.short_sums import Door, ShortSums
from shoal_worker.backends.gloo.sockets import GroupSockets, Listener, listeners
from shoal_worker.settings import gloo_interface
from shoal_worker.torch_internals import gloo_options

_DEVICE_ATTEMPTS: Final = 10
_MOST_NAMED: Final = 8
_NUMBERS: Final = itertools.count()
_LISTENER_LOCK: Final = threading.Lock()
"""Lock held while a Gloo device is created, so that the device's listening socket is the only new
one and can be recognized."""


@dataclass(frozen=True, kw_only=True)
class GlooGroup:
    """A connected group, its connections, and the time limit of its collectives and messages."""

    process_group: dist.ProcessGroup
    """Group for torch's parallel code. It is created in the same way as by torch's new_group, but
    not registered with torch."""
    sockets: GroupSockets
    sums: ShortSums | None
    """Connections for short sums; None if the group has none."""
    timeout: timedelta

    def close(self) -> None:
        """Releases the connections, except connections that Gloo still uses. Idempotent."""
        self.sockets.close()
        if self.sums is not None:
            self.sums.close()


def connect_gloo(
    store: Store,
    rank: int,
    world_size: int,
    *,
    hostname: str | None,
    connect_timeout: timedelta,
    timeout: timedelta,
    sums_with: Callable[[ShortSums], None] | None = None,
) -> GlooGroup:
    """Connects to all peers; blocks. Ranks publish their listening addresses in the store, so that
    each rank can identify the group's connections among its sockets.

    `sums_with`: function that is called with the group's `ShortSums` before they are connected;
    None: the group has no connections for short sums. Must be given on all ranks or on none."""
    deadline = time.monotonic() + connect_timeout.total_seconds()
    device, listener = _make_device(hostname)
    names = PrefixStore("listener", store)
    host, port = listener.endpoint
    with contextlib.ExitStack() as undo:
        sums = _listen(host, rank, world_size) if sums_with is not None else None
        if sums is not None and sums_with is not None:
            undo.callback(sums.close)
            sums_with(sums)
        names.set(str(rank), f"{host} {port}|{sums.door if sums is not None else ''}")
        try:
            group = _connect_native(device, store, rank, world_size, connect_timeout, timeout)
        except RuntimeError:
            _check_families(names, world_size)
            raise
        published = [
            name.decode().partition("|")
            for name in names.multi_get([str(peer) for peer in range(world_size)])
        ]
        endpoints = [endpoint.rsplit(" ", 1) for endpoint, _, _ in published]
        sockets = GroupSockets(
            listener,
            {(host, int(port)) for peer, (host, port) in enumerate(endpoints) if peer != rank},
        )
        undo.callback(sockets.close)
        if sums is not None and all(door for _, _, door in published):
            _connect_sums(
                sums,
                {peer: Door.parse(door) for peer, (_, _, door) in enumerate(published)},
                deadline,
                timeout,
            )
        elif sums is not None:
            sums.close()
            sums = None
        undo.pop_all()
    return GlooGroup(process_group=group, sockets=sockets, sums=sums, timeout=timeout)


def _check_families(names: Store, world_size: int) -> None:
    """Raises ConfigurationError if some ranks listen on IPv4 addresses and others on IPv6
    addresses: Gloo can never connect two such ranks."""
    everybody = [str(rank) for rank in range(world_size)]
    if not names.check(everybody):
        return
    hosts = [
        stored.decode().partition("|")[0].rpartition(" ")[0]
        for stored in names.multi_get(everybody)
    ]
    sixes = [rank for rank, host in enumerate(hosts) if ":" in host]
    fours = [rank for rank, host in enumerate(hosts) if ":" not in host]
    if sixes and fours:
        raise ConfigurationError(
            f"rank {fours[0]} listens at {hosts[fours[0]]} and rank {sixes[0]} at "
            f"{hosts[sixes[0]]}: Gloo needs all ranks in one address family, IPv4 or IPv6; "
            f"{REACHED_ELSEWHERE}",
            reason="ADDRESS_FAMILIES_DIFFER",
        )


def _listen(host: str, rank: int, world_size: int) -> ShortSums | None:
    """Listens for short sums. Returns None if the address does not allow that, for example because
    it is a link-local address; the group then has no short sums."""
    with _LISTENER_LOCK:  # otherwise this listener could be taken for Gloo's
        try:
            return ShortSums(host, rank, world_size)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return None
            raise


def _connect_sums(
    sums: ShortSums, doors: dict[int, Door], deadline: float, timeout: timedelta
) -> None:
    try:
        sums.connect(doors, deadline=deadline, timeout=timeout)
    except OSError as error:
        raise GroupEndedError(
            f"connecting {len(doors)} ranks for short sums failed: {error}"
        ) from error


def _connect_native(
    device: Any,
    store: Store,
    rank: int,
    world_size: int,
    connect_timeout: timedelta,
    timeout: timedelta,
) -> dist.ProcessGroup:
    options = gloo_options()
    options._devices = [device]
    options._timeout = connect_timeout
    backend = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
    backend.set_timeout(timeout)
    return _as_process_group(store, rank, world_size, backend)


def _as_process_group(
    store: Store, rank: int, world_size: int, backend: ProcessGroupGloo
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(PrefixStore("group", store), rank, world_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    if torch.cuda.is_available():
        group._register_backend(torch.device("cuda"), kind, backend)
    group._set_group_name(GroupName(f"shoal_gloo_{next(_NUMBERS)}"))
    return group


class FormingGroup:
    """Runs `connect_gloo` in a thread. The thread is not a daemon thread, because the interpreter
    would crash if it exited while such a thread was running."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        hostname: str | None,
        connect_timeout: timedelta,
        timeout: timedelta,
        short_sums: bool = True,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._connect_timeout = connect_timeout
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._group: GlooGroup | None = None
        self._sums: ShortSums | None = None
        """The group's short sums while it is being connected; None before and after."""
        self._error: Exception | None = None
        arguments = {
            "hostname": hostname,
            "connect_timeout": connect_timeout,
            "timeout": timeout,
            "sums_with": self._begin_sums if short_sums else None,
        }
        thread = threading.Thread(
            target=self._run,
            args=(store, rank, world_size),
            kwargs=arguments,
            name="shoal-gloo-forming",
        )
        thread.start()

    def give_up(self, reason: str) -> None:
        """Makes `wait` raise GroupEndedError(reason) immediately, and drops the group once it is
        connected. Does nothing if `wait` has already returned the group."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
            sums = self._sums
            self._changed.notify_all()
        if sums is not None:
            sums.shut_down()

    def wait(self) -> GlooGroup:
        """Blocks until the group is connected and returns it.

        Raises:
            MembershipChanged: the attempt was abandoned, or a peer disconnected.
            DeadlineError: a peer did not connect in time.
            Exception: an error of the store."""
        deadline = time.monotonic() + self._connect_timeout.total_seconds()
        try:
            with self._changed:
                while self._group is None and self._error is None and self._reason is None:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise self._too_late()
                    self._changed.wait(remaining)
                if self._reason is not None:
                    raise GroupEndedError(self._reason)
                if self._error is not None:
                    raise self._translated(self._error) from self._error
                assert self._group is not None
                group, self._group, self._sums = self._group, None, None
                return group
        finally:
            self.give_up("the group is no longer needed")
            self._let_go()

    def _run(self, *arguments: Any, **options: Any) -> None:
        group: GlooGroup | None = None
        error: Exception | None = None
        try:
            group = connect_gloo(*arguments, **options)
        except Exception as caught:
            # Otherwise the traceback would keep the sockets of the unfinished group open as long as
            # the error exists.
            traceback.clear_frames(caught.__traceback__)
            error = caught
        with self._changed:
            self._group, self._error = group, error
            given_up = self._reason is not None
            self._changed.notify_all()
        if given_up:
            self._let_go()

    def _begin_sums(self, sums: ShortSums) -> None:
        with self._changed:
            self._sums = sums
            given_up = self._reason is not None
        if given_up:
            sums.shut_down()

    def _let_go(self) -> None:
        """Closes the connected group, unless `wait` has returned it, and drops the stored error."""
        with self._changed:
            group, self._group, self._error = self._group, None, None
        if group is not None:
            group.close()

    def _too_late(self) -> DeadlineError:
        names = PrefixStore("listener", self._store)
        absent = [rank for rank in range(self._world_size) if not names.check([str(rank)])]
        who = (
            f"ranks {absent} did not arrive"
            if absent
            else (
                "all ranks arrived, but not all could connect to each other "
                f"({self._listening(names)}); {REACHED_ELSEWHERE}"
            )
        )
        return DeadlineError(
            f"connecting {self._world_size} ranks took longer than "
            f"connect_timeout={self._connect_timeout.total_seconds():g} s: {who}",
            reason="CONNECT_TIMEOUT",
        )

    def _listening(self, names: Store) -> str:
        """Returns the ranks' listening addresses as text for error messages."""
        named = [str(rank) for rank in range(min(self._world_size, _MOST_NAMED))]
        addresses = [
            stored.decode().partition("|")[0].rpartition(" ") for stored in names.multi_get(named)
        ]
        more = "" if self._world_size <= _MOST_NAMED else ", ..."
        return (
            ", ".join(
                f"rank {rank} listens at {Address(host, int(port))}"
                for rank, (host, _, port) in enumerate(addresses)
            )
            + more
        )

    def _translated(self, error: Exception) -> Exception:
        # A timeout of the store, Shoal's or torch's: it has waited for the key of a missing rank.
        if isinstance(error, DeadlineError) or (
            isinstance(error, dist.DistStoreError) and "timeout" in str(error).lower()
        ):
            return self._too_late()
        if isinstance(error, ShoalError) or not isinstance(error, RuntimeError):
            return error
        return GroupEndedError(
            f"connecting {self._world_size} ranks with Gloo failed: {cause_of(error)}; "
            f"{REACHED_ELSEWHERE}"
        )


def _make_device(hostname: str | None) -> tuple[Any, Listener]:
    """Creates a Gloo device. Returns it with its listening socket, which is identified as the only
    new one in this process. Retries if another thread has opened a socket at the same time."""
    for _ in range(_DEVICE_ATTEMPTS):
        with _LISTENER_LOCK:
            before = listeners()
            device = _create_device(hostname)
            new = [one for inode, one in listeners().items() if inode not in before]
        if len(new) == 1:
            return device, new[0]
    raise InternalError(
        "could not identify Gloo's listening socket among this process's sockets in "
        f"{_DEVICE_ATTEMPTS} attempts, because other threads opened sockets at the same time; "
        "initialize the group again"
    )


def _create_device(hostname: str | None) -> Any:
    # All connections are opened now (no lazy_init), regardless of TORCH_GLOO_LAZY_INIT, because an
    # abort would not break connections that are opened later.
    interface = gloo_interface()
    try:
        if hostname is not None:
            return ProcessGroupGloo.create_device(hostname=hostname, lazy_init=False)
        if interface:
            return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
        return ProcessGroupGloo.create_default_device(lazy_init=False)
    except RuntimeError as error:
        raise ConfigurationError(
            f"hostname={hostname!r}, GLOO_SOCKET_IFNAME={interface!r}: Gloo cannot listen there "
            f"({cause_of(error)}); expected an address, name or interface of this host "
            "(--local-addr, SHOAL_LOCAL_ADDR). Ranks behind NAT cannot form a Gloo group, "
            "because Gloo announces the address it listens on; use async_sgd, which needs no "
            "group"
        ) from error
