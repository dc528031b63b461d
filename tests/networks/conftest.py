"""Networks of machines for tests. A network is removed when its test ends; leftovers of a killed
run are removed when the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.machines import Machines, hindrance
from tests.networks.network import COORDINATOR, REDIS, Network


@pytest.fixture
def network(tmp_path: Path, leftover_processes: None) -> Iterator[Callable[..., Network]]:
    """Makes a network of `hosts` machines for a job, plus one each for the coordinator and Redis,
    which are started."""
    if (why := hindrance()) is not None:
        pytest.skip(f"a network of machines cannot be made here: {why}")
    with ExitStack() as stack:

        def make(hosts: int, *, ipv6: bool = False, **script: str) -> Network:
            names = [f"host-{number}" for number in range(hosts)]
            machines = stack.enter_context(Machines(COORDINATOR, REDIS, *names, ipv6=ipv6))
            made = Network(machines, names, tmp_path, **script)
            stack.callback(made.close)
            made.start_services()
            return made

        yield make
