"""Machines with unusual addresses: several networks, IPv6 only, host names that other machines
cannot resolve, NAT."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.errors import MeasurementError
from benchmarks.machines import INTERFACE, SECOND_INTERFACE
from tests.networks.network import Network

Make = Callable[..., Network]

OUTSIDE = "10.77.0.100"
"""Address under which other machines reach the machine behind the router."""


@pytest.mark.soak
@pytest.mark.parametrize("named", ["interface", "address"])
def test_machines_joined_by_one_of_two_networks_train_over_the_named_one(
    network: Make, named: str
) -> None:
    job = network(2, SHOAL_METRICS_LISTEN="0.0.0.0:0")
    job.machines.connect(*job.hosts)
    job.cut(["host-0"], ["host-1"])  # of the coordinator's network: it does not connect them
    for host in job.hosts:
        job.launch(
            host,
            "--local-addr",
            SECOND_INTERFACE if named == "interface" else job.machines.second_address(host),
        )
    job.wait_all_train()
    assert job.targets() == {job.machines.second_address(host) for host in job.hosts}
    job.check_all_stayed()
    job.finish()


@pytest.mark.soak
def test_plain_script_on_such_machines_sums_over_the_named_network(
    network: Make,
) -> None:
    job = network(2)
    job.machines.connect(*job.hosts)
    job.cut(["host-0"], ["host-1"])
    launchers = [
        job.launch(host, "--local-addr", SECOND_INTERFACE, script="train_plain.py")
        for host in job.hosts
    ]
    assert [launcher.wait() for launcher in launchers] == [0, 0], job.received()
    results = job.results()
    assert [result["total"] for result in results] == [2.0, 2.0]
    assert {result["met_at"] for result in results} < {
        job.machines.second_address(host) for host in job.hosts
    }


@pytest.mark.soak
def test_unreachable_addresses_are_reported_with_their_owner_and_the_flag_that_changes_them(
    network: Make,
) -> None:
    job = network(2)
    job.machines.connect(*job.hosts)
    job.cut(["host-0"], ["host-1"])
    for host in job.hosts:
        job.launch(host)
    pattern = re.compile(r"cannot reach rank \d \(host-\d\) at 10\.77\.0\.\d:\d+.*")
    line = job.eventually(lambda: pattern.search(job.said()), "a word on who cannot be reached")[0]
    assert (
        "start its launcher with --local-addr (SHOAL_LOCAL_ADDR). Other machines reach this "
        "machine at 10.77.0." in line
    )


@pytest.mark.soak
def test_machines_with_only_ipv6_train(network: Make) -> None:
    job = network(2, ipv6=True)
    job.launch_all()
    job.check_all_stayed()
    job.finish()


@pytest.mark.soak
def test_machines_with_both_families_train_over_the_named_one(network: Make) -> None:
    """The coordinator is reached through IPv4."""
    job = network(2)
    for number, host in enumerate(job.hosts):
        job.machines.configure(
            host, "ip", "address", "add", f"fd78::{number + 1}/64", "nodad", "dev", INTERFACE
        )
        job.launch(host, "--local-addr", f"fd78::{number + 1}")
    job.cut(["host-0"], ["host-1"])  # of IPv4
    job.wait_all_train()
    job.check_all_stayed()
    job.finish()


@pytest.mark.soak
@pytest.mark.parametrize("ipv6", [False, True])
def test_parameter_server_with_a_name_unknown_to_others_is_reached_by_workers(
    network: Make, ipv6: bool
) -> None:
    """With IPv4 the machine's name resolves to 127.0.1.1 on that machine, as on Debian. With IPv6
    it does not resolve."""
    job = network(2, ipv6=ipv6, EPOCHS="3")
    if not ipv6:
        hosts = job.directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n127.0.1.1 host-0\n")
        job.machines.know_hosts("host-0", hosts)
    job.start_parameter_server("host-0", "--server-id", "s")
    _trains_with_servers(job)


def _trains_with_servers(job: Network, *flags_of_first: str) -> None:
    flags = {"host-0": flags_of_first}
    launchers = [
        job.launch(
            host, "--servers", "1", *flags.get(host, ()), nnodes="2", script="train_async.py"
        )
        for host in job.hosts[:2]
    ]
    assert [launcher.wait() for launcher in launchers] == [0, 0], job.received()
    results = job.results()
    assert len(results) == 2, job.received()
    assert all(result["loss"] < 0.2 * result["without"] for result in results), results


def _put_behind_nat(job: Network, *, inside: str, router: str) -> None:
    """Makes the router the only neighbour of `inside`. Other machines reach it at OUTSIDE, an
    address of the router."""
    if shutil.which("nft") is None:
        pytest.skip("NAT needs the program nft (Debian: nftables)")
    machines = job.machines
    machines.connect(inside, router)
    machines.configure(inside, "ip", "link", "set", INTERFACE, "down")
    machines.configure(
        inside, "ip", "route", "add", "default", "via", machines.second_address(router)
    )
    machines.configure(router, "ip", "address", "add", f"{OUTSIDE}/24", "dev", INTERFACE)
    machines.configure(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    rules = (
        "table ip nat {\n"
        f"chain in {{ type nat hook prerouting priority -100; ip daddr {OUTSIDE} dnat to "
        f"{machines.second_address(inside)}; }}\n"
        f"chain out {{ type nat hook postrouting priority 100; ip saddr "
        f"{machines.second_address(inside)} snat to {OUTSIDE}; }}\n"
        "}\n"
    )
    file = Path(job.directory) / "nat.nft"
    file.write_text(rules)
    try:
        machines.configure(router, "nft", "-f", str(file))
    except MeasurementError as error:
        pytest.skip(f"NAT cannot be had in network namespaces here: {error}")


@pytest.mark.soak
def test_machine_behind_nat_and_its_parameter_server_are_reached_at_the_reported_address(
    network: Make,
) -> None:
    job = network(3, EPOCHS="3")
    _put_behind_nat(job, inside="host-0", router="host-2")
    job.start_parameter_server("host-0", "--server-id", "s", "--advertise", OUTSIDE)
    _trains_with_servers(job, "--local-addr", OUTSIDE, "--listen-addr", "0.0.0.0")


@pytest.mark.soak
def test_ranks_behind_nat_that_need_a_group_are_informed_that_gloo_cannot_be_reached_there(
    network: Make,
) -> None:
    job = network(3)
    _put_behind_nat(job, inside="host-0", router="host-2")
    behind = job.launch(
        "host-0", "--local-addr", OUTSIDE, "--listen-addr", SECOND_INTERFACE, nnodes="2"
    )
    job.launch("host-1", nnodes="2")
    assert behind.wait() == 1
    assert f"hostname='{OUTSIDE}'" in behind.said()
    assert "Ranks behind NAT cannot form a Gloo group" in behind.said()


def test_an_address_that_the_machine_does_not_have_is_refused_at_the_start(network: Make) -> None:
    job = network(1)
    launcher = job.launch("host-0", "--local-addr", OUTSIDE)
    assert launcher.wait() == 2, launcher.said()
    received = (
        f"--local-addr (SHOAL_LOCAL_ADDR) '{OUTSIDE}' is not an address of this machine, which has "
        "lo 127.0.0.1, ::1; eth0 10.77.0.3"
    )
    assert received in launcher.said()
