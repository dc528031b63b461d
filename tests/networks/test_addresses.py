"""Machines that are not simple: several networks, IPv6 alone, names that do not resolve, NAT."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.machines import SECOND_INTERFACE
from tests.networks.network import Network

Make = Callable[..., Network]


@pytest.mark.soak
@pytest.mark.parametrize("named", ["interface", "address"])
def test_machines_that_one_of_two_networks_connects_train_by_the_interface_that_is_named(network: Make, named: str) -> None:
    job = network(2)
    job.machines.connect(*job.hosts)
    job.cut(["host-0"], ["host-1"])  # of the network of the coordinator: it does not connect them
    for host in job.hosts:
        job.launch(host, "--local-addr", SECOND_INTERFACE if named == "interface" else job.machines.second_address(host))
    job.wait_all_train()
    job.check_all_stayed()
    job.finish()


@pytest.mark.soak
def test_machines_that_have_ipv6_alone_train(network: Make) -> None:
    job = network(2, ipv6=True)
    job.launch_all()
    job.check_all_stayed()
    job.finish()
