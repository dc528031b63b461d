"""The addresses that a server advertises to workers and, for its metrics, to Prometheus."""

from __future__ import annotations

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.system.own_address import name_for_others
from shoal_ps_server.settings import PsServerSettings, parse_command_line

BASE = ("--coordinator", "127.0.0.1:7000", "--job", "job", "--server-id", "s")
EVERYWHERE = (*BASE, "--listen", "0.0.0.0:0", "--http", "[::]:0")


def advertised(settings: PsServerSettings) -> tuple[str, str]:
    return settings.advertised(7), settings.advertised_http(8)


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_LOCAL_ADDR", raising=False)


def test_default_advertised_address_is_the_listening_one() -> None:
    assert advertised(parse_command_line((*BASE, "--listen", "[::1]:0"))) == (
        "[::1]:7",
        "127.0.0.1:8",
    )


def test_server_on_all_addresses_advertises_a_usable_name_or_its_route_to_the_coordinator() -> None:
    host = name_for_others() or "127.0.0.1"
    assert advertised(parse_command_line(EVERYWHERE)) == (f"{host}:7", f"{host}:8")


def test_advertised_address_may_be_an_interface_or_a_name_known_only_to_others() -> None:
    assert advertised(parse_command_line((*EVERYWHERE, "--advertise", "servers.example"))) == (
        "servers.example:7",
        "servers.example:8",
    )
    assert advertised(parse_command_line((*EVERYWHERE, "--advertise", "lo"))) == (
        "127.0.0.1:7",
        "127.0.0.1:8",
    )


def test_machines_variable_applies_to_a_server_on_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_LOCAL_ADDR", "203.0.113.7")
    assert advertised(parse_command_line(EVERYWHERE)) == ("203.0.113.7:7", "203.0.113.7:8")
    assert advertised(parse_command_line(BASE)) == ("127.0.0.1:7", "127.0.0.1:8")
    assert (
        advertised(parse_command_line((*EVERYWHERE, "--advertise", "servers.example")))[0]
        == "servers.example:7"
    )
    monkeypatch.setenv("SHOAL_LOCAL_ADDR", "eth9")
    with pytest.raises(
        ConfigurationError,
        match=r"SHOAL_LOCAL_ADDR.*'eth9' is not an address, an interface or a host name",
    ):
        parse_command_line(EVERYWHERE).advertised(7)
