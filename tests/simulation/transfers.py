"""Simulated transfer of state between ranks, and the store through which they rendezvous. They
replace sockets and Redis.

A transfer takes virtual time, fails when either side ends, and serializes the state as a real one
does. Donors that offer different states under one name are a violation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from shoal_common.errors import UnavailableError
from shoal_common.failpoints import failpoint
from shoal_worker.state.digest import digest
from shoal_worker.state.tree import flatten, unflatten
from shoal_worker.store.errors import StoreAbortedError, StoreTimeoutError
from torch._C._distributed_c10d import Store

from tests.simulation.processes import Process, own_process
from tests.simulation.scheduler import own_scheduler

_BLOCK_TIMEOUT_S = 30.0


class Connection:
    """The connections of one receiver to its donors."""

    def __init__(self) -> None:
        self.shut = False

    def shutdown(self, _: int) -> None:
        """Shuts the connections down, so that reads and waits fail."""
        self.shut = True


class SimulatedDonor:
    """Replaces `StateDonor`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._expected: str | None = None
        self._offers: dict[str, Any] = {}
        self._serving: list[Connection] = []
        self.address = f"{process.name}:1"
        self.key = f"key of {process.name}"
        self.is_secure = False
        process.world.donors[self.address] = self

    @property
    def name(self) -> str:
        """Name of the donor's process."""
        return self._process.name

    @property
    def gone(self) -> bool:
        """True if the donor's process has died or ended."""
        return self._process.dead or self._process.ended

    def expect(self, nonce: str) -> None:
        """Implements `StateDonor.expect`."""
        self._expected = nonce

    @contextlib.contextmanager
    def offering(self, state: object, nonce: str, without: Collection[str] = ()) -> Iterator[None]:
        """Implements `StateDonor.offering`."""
        structure, tensors = flatten(state)
        self._offers[nonce] = (
            structure,
            {name: tensor for name, tensor in tensors.items() if name not in without},
        )
        try:
            yield
        finally:
            self._offers.pop(nonce, None)
            for connection in self._serving:
                connection.shutdown(0)
            self._serving.clear()

    def refuses(self, nonce: str) -> bool:
        """Returns whether the donor expects the receivers of another generation."""
        return nonce not in self._offers and self._expected not in (None, nonce)

    def offers(self, nonce: str) -> Any:
        """Returns the offered state; None before it is offered."""
        return self._offers.get(nonce)

    def serve(self, connection: Connection) -> None:
        """Registers a connection, which is shut down when the offer is withdrawn."""
        self._serving.append(connection)

    def close(self) -> None:
        """Implements `StateDonor.close`."""


def take_state(
    addresses: Sequence[str],
    nonce: str,
    *,
    timeout: timedelta,
    keys: Sequence[str] = (),
    guard: Callable[[Any], None] = lambda connection: None,
    own: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Any, int]:
    """Replaces `transfer.take_state`."""
    failpoint("transfer.before_request")
    taker, scheduler = own_process(), own_scheduler()
    world = taker.world
    donors = [world.donors[address] for address in addresses]
    connection = Connection()
    guard(connection)

    def broken() -> bool:
        return connection.shut or any(donor.gone or donor.refuses(nonce) for donor in donors)

    def offered_here() -> bool:  # asked on whichever thread has the turn
        return all(
            donor.offers(nonce) and world.network.reaches(taker.name, donor.name)
            for donor in donors
        )

    patience = min(timeout.total_seconds(), _BLOCK_TIMEOUT_S)
    scheduler.wait(
        lambda: broken() or offered_here(), patience, f"for the state of {', '.join(addresses)}"
    )
    if broken() or not offered_here():
        raise UnavailableError(
            f"donors {addresses} went away before they sent their state", reason="DONOR_LOST"
        )
    for donor in donors:
        donor.serve(connection)
    scheduler.wait(
        broken, world.delay(0.001, 0.02), f"until the state of {', '.join(addresses)} is here"
    )
    if broken():
        raise UnavailableError(
            f"donors {addresses} went away while they sent their state", reason="DONOR_LOST"
        )
    offered = [donor.offers(nonce) for donor in donors]
    digests = {
        digest(structure, {**own, **{n: t.detach().contiguous() for n, t in tensors.items()}})
        for structure, tensors in offered
    }
    if len(digests) > 1:
        world.violated("donors", f"{', '.join(addresses)} offer different states under one name")
    structure, tensors = offered[0]
    staged = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return unflatten(json.loads(json.dumps(structure)), {**own, **staged}), sum(
        t.nbytes for t in staged.values()
    )


class SimulatedStore(Store):
    """Replaces `RedisStore`, as far as connecting ranks use it."""

    def __init__(self, _: str, prefix: str, *, timeout: timedelta) -> None:
        super().__init__()
        self.name = prefix.split(":store:")[-1]
        self._values = own_process().world.stores.setdefault(prefix, {})
        self._aborted: str | None = None

    def add(self, key: str, amount: int) -> int:
        """Implements `RedisStore.add`."""
        self._values[key] = self._values.get(key, 0) + amount
        return int(self._values[key])

    def set(self, key: str, value: Any) -> None:
        """Implements `RedisStore.set`."""
        self._values[key] = value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Implements `RedisStore.wait`."""
        assert timeout is not None
        came = own_scheduler().wait(
            lambda: self._aborted is not None or all(key in self._values for key in keys),
            timeout.total_seconds(),
            f"for all of {self.name}",
        )
        if self._aborted is not None:
            raise StoreAbortedError(self._aborted)
        if not came:
            own_process().world.timed_out(f"{own_process().name} waits for all of {self.name}")
            raise StoreTimeoutError(f"{list(keys)} did not come within {timeout}: timed out")

    def abort(self, reason: str) -> None:
        """Implements `RedisStore.abort`."""
        self._aborted = reason


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state by their paths."""
    return dict(flatten(state)[1])
