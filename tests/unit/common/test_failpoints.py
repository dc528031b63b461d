"""The documented failpoints are those in the code. A test that arms an unknown one would wait
forever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_common import failpoints
from shoal_common.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
PLACES = {
    "Workers": "worker/shoal_worker",
    "Parameter servers": "ps_server/shoal_ps_server",
    "Coordinator": "coordinator/shoal_coordinator",
}


def documented(service: str) -> set[str]:
    assert failpoints.__doc__ is not None
    section = failpoints.__doc__.split(f"{service}:\n\n")[1].split("\n\n")[0]
    return set(re.findall(r"^ {4}([a-z_.]+) ", section, re.MULTILINE))


def passed(package: str) -> Iterator[str]:
    for file in (ROOT / package).rglob("*.py"):
        yield from re.findall(
            r"failpoint\(\"([\w.]+)\"\)|_passes\(\"([\w.]+)\"\)", file.read_text()
        )


@pytest.mark.parametrize(("service", "package"), PLACES.items())
def test_every_failpoint_of_a_service_is_documented_and_every_documented_one_exists(
    service: str, package: str
) -> None:
    assert documented(service) == {"".join(found) for found in passed(package)}


@pytest.mark.parametrize("wrong", ["name", "name@one=kill", "name@1=explode"])
def test_impossible_failpoint_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_FAILPOINTS", wrong)
    monkeypatch.setattr(failpoints, "_wanted", failpoints._wanted.__wrapped__)
    with pytest.raises(ConfigurationError, match="expected name@hit=action"):
        failpoints.failpoint("name")


def test_only_the_requested_hit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_FAILPOINTS", "name@2=raise")
    monkeypatch.setattr(failpoints, "_wanted", failpoints._wanted.__wrapped__)
    monkeypatch.setattr(failpoints, "_hits", type(failpoints._hits)())
    failpoints.failpoint("name")
    failpoints.failpoint("another")
    with pytest.raises(RuntimeError, match="a failpoint raised this"):
        failpoints.failpoint("name")
    failpoints.failpoint("name")
