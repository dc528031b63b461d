"""docs/security.md lists the callers of every RPC and describes every listening flag, in agreement
with the code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import shoal_coordinator.settings
import shoal_ps_server.settings
from shoal.cli import app as commands
from shoal_common.security.authentication import Role
from shoal_coordinator.service.methods import ALLOWED_ROLES as COORDINATOR
from shoal_ps_server.service.servicer import ALLOWED_ROLES as SERVER
from typer.main import get_group

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/security.md").read_text()
LOCAL = {"up", "demo", "certs", "plan", "check", "compare", "history", "init", "health"}
"""Commands that contact no cluster, or only their own."""


def rows() -> dict[str, set[str]]:
    """Returns the roles of each RPC on the page."""
    found = re.findall(
        r"^\| `(Coordinator|ParameterServer)/(\w+)` \|([^|]*)\|$", PAGE, re.MULTILINE
    )
    names = "|".join(Role)
    return {
        f"/shoal.v1.{service}/{method}": set(re.findall(rf"\b({names})\b", roles))
        for service, method, roles in found
    }


def test_the_page_has_each_rpc_with_its_roles() -> None:
    assert rows() == {
        method: {str(role) for role in roles - {Role.ADMIN}}
        for method, roles in {**COORDINATOR, **SERVER}.items()
    }


def test_the_page_explains_each_role() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| \w", PAGE, re.MULTILINE)) >= set(Role)


@pytest.mark.parametrize(
    ("parse", "arguments"),
    [
        (shoal_coordinator.settings.parse_command_line, []),
        (shoal_ps_server.settings.parse_command_line, ["--coordinator", "h:1", "--job", "j"]),
    ],
)
def test_page_has_each_port_and_each_security_flag_of_a_service(
    parse, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: set[str] = set()
    add = argparse.ArgumentParser.add_argument

    def noting(self: argparse.ArgumentParser, *names: str, **more: object) -> object:
        flags.update(names)
        return add(self, *names, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", noting)
    parse(arguments)
    secure = {
        flag
        for flag in flags
        if re.match(r"--(tls|token|redis-(file|ca)|listen|http|bulk-port|insecure)", flag)
    } - {"--token"}
    assert secure
    assert {flag for flag in secure if f"`{flag}`" not in PAGE} == set()


def test_every_command_that_contacts_a_cluster_has_the_security_flags() -> None:
    group = get_group(commands.app)
    with_flags = {
        name
        for name, command in group.commands.items()
        if {"--tls-ca", "--tls-cert", "--tls-key", "--token-file"}
        <= {option for each in command.params for option in each.opts}
    }
    assert with_flags == set(group.commands) - LOCAL
    for name in with_flags:
        assert f"`{name}`" in PAGE
