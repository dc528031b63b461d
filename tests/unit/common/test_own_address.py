"""The addresses of this machine that other processes receive, and the errors for unusable ones."""

from __future__ import annotations

import socket

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.system.own_address import (
    OwnAddress,
    interface_of,
    interfaces,
    is_own,
    name_for_others,
    of_interface,
    own_host,
    resolved,
    route_towards,
)

HERE = ("127.0.0.1", 7000)
FOREIGN = "192.0.2.77"  # reserved by RFC 5737: no machine has it


def test_default_address_is_that_of_the_route_to_the_coordinator() -> None:
    assert OwnAddress.find(None, None, towards=HERE) == OwnAddress(
        announced="127.0.0.1", bound="127.0.0.1"
    )
    assert OwnAddress.find(None, "0.0.0.0", towards=HERE) == OwnAddress(
        announced="127.0.0.1", bound="0.0.0.0"
    )


@pytest.mark.parametrize("name", ["lo", "127.0.0.1", "localhost"])
def test_interface_address_and_host_name_give_the_same_result(name: str) -> None:
    assert OwnAddress.find(name, None, towards=HERE) == OwnAddress(
        announced="127.0.0.1", bound="127.0.0.1"
    )


def test_interface_with_both_families_uses_that_of_the_coordinator() -> None:
    assert interfaces()["lo"] == ["127.0.0.1", "::1"], (
        "this test needs a loopback interface with IPv4 and IPv6"
    )
    assert OwnAddress.find("lo", None, towards=HERE).announced == "127.0.0.1"
    assert OwnAddress.find("lo", None, towards=("::1", 7000)).announced == "::1"


def test_address_in_brackets_is_accepted() -> None:
    assert OwnAddress.find(f"[{FOREIGN}]", "lo", towards=HERE).announced == FOREIGN


def test_reported_address_differs_from_the_listening_one_under_nat() -> None:
    assert OwnAddress.find(FOREIGN, "0.0.0.0", towards=HERE) == OwnAddress(
        announced=FOREIGN, bound="0.0.0.0"
    )
    assert OwnAddress.find(FOREIGN, "lo", towards=HERE) == OwnAddress(
        announced=FOREIGN, bound="127.0.0.1"
    )


def test_address_of_another_machine_is_refused_with_the_local_ones_and_a_remedy() -> None:
    with pytest.raises(ConfigurationError) as refused:
        OwnAddress.find(FOREIGN, None, towards=HERE)
    assert refused.value.reason == "ADDRESS_UNUSABLE"
    for part in (
        "--local-addr",
        "SHOAL_LOCAL_ADDR",
        repr(FOREIGN),
        "lo 127.0.0.1",
        "--listen-addr",
        "NAT",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("local", "listen", "expected"),
    [
        ("eth9", None, r"--local-addr .* 'eth9' is not an address, an interface or a host name"),
        ("0.0.0.0", None, r"--local-addr .* '0\.0\.0\.0' means all addresses"),
        ("fe80::1", None, r"--local-addr .* 'fe80::1' is valid only on one link"),
        (None, FOREIGN, rf"--listen-addr .* '{FOREIGN}' is not an address of this machine"),
    ],
)
def test_unusable_addresses_are_refused(
    local: str | None, listen: str | None, expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        OwnAddress.find(local, listen, towards=HERE)


def test_unknown_coordinator_host_is_a_configuration_error() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"cannot resolve or reach the coordinator's host 'nowhere\.invalid'.*--local-addr",
    ):
        OwnAddress.find(None, None, towards=("nowhere.invalid", 7000))


def test_interfaces_match_the_kernels() -> None:
    found = interfaces()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert all(is_own(address) for addresses in found.values() for address in addresses)
    assert not is_own(FOREIGN)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(FOREIGN) is None
    assert of_interface("lo") == "127.0.0.1"
    assert of_interface("eth9") is None


def test_service_address_may_be_an_interface_a_name_or_a_public_address() -> None:
    assert own_host("lo") == "127.0.0.1"
    assert own_host("elsewhere.example") == "elsewhere.example"
    assert own_host("") in {
        name_for_others(),
        *(address for each in interfaces().values() for address in each),
        socket.gethostname(),
    }


def test_unresolvable_names_and_unreachable_hosts_are_not_errors_in_a_query() -> None:
    assert resolved("nowhere.invalid") == []
    assert route_towards("nowhere.invalid", 9) is None
