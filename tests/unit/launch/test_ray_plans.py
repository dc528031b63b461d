"""`shoal.ray.run` without Ray: its requests, its refusals and the flags of its launchers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import shoal
from shoal.ray.run_plan import Plan
from shoal_common.errors import ConfigurationError

from tests.missing import pretend_missing

TRAIN = ("train.py", "--epochs", "3")


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "workers": 4,
        "resources": {"CPU": 1},
        "server_resources": {"CPU": 1},
        "environment": {},
        "files": {},
    }
    return Plan(**{"job_id": "train-1", "script": TRAIN, **settings, **changes})


def flags(made: Plan) -> dict[str, str]:
    arguments = made.launcher("head:7000", secrets={"SHOAL_TOKEN": "secret"}).arguments
    assert arguments[1] == "run"
    assert arguments[-len(TRAIN) :] == TRAIN
    words = arguments[2 : -len(TRAIN)]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_workers_are_placed_together_and_one_suffices_to_continue() -> None:
    made = plan(workers=4)
    assert made.gang == 4
    assert flags(made)["--nnodes"] == "1:4"
    assert flags(made)["--rdzv-conf"] == "last_call_timeout=30"


def test_minimum_is_placed_together_and_workers_above_it_are_not_awaited() -> None:
    made = plan(workers=(2, 4))
    assert made.gang == 2
    assert flags(made)["--nnodes"] == "2:4"
    assert "--rdzv-conf" not in flags(made)


def test_several_workers_in_a_bundle_have_one_launcher() -> None:
    made = plan(workers=16, workers_per_bundle=8)
    assert made.gang == 2
    assert (flags(made)["--nnodes"], flags(made)["--nproc-per-node"]) == ("1:2", "8")


def test_launchers_take_part_only_in_the_first_run_of_their_job() -> None:
    assert (flags(plan())["--run"], flags(plan())["--rdzv-id"]) == ("1", "train-1")


def test_secrets_appear_in_no_argument_and_no_repr() -> None:
    made = plan(environment={"API_KEY": "secret"}, servers=1)
    for command in (
        made.launcher("a:1", secrets={"SHOAL_TOKEN": "secret"}),
        made.server(0, "a:1", token="secret", tokens=b"secret"),
    ):
        assert "secret" not in repr(command)
        assert "secret" in command.environment.values()
    assert "secret" not in repr(made)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workers": 0}, r"workers=0: expected a number of at least 1, or \(FEWEST, MOST\)"),
        ({"workers": (3, 2)}, r"workers=\(3, 2\)"),
        (
            {"workers": 3, "workers_per_bundle": 2},
            "workers_per_bundle=2: expected workers in multiples",
        ),
        ({"resources": {}}, "resources={}: expected one or more of Ray's resource names"),
        ({"resources": {"GPU": 0}}, "resources={'GPU': 0}"),
        ({"strategy": "NEAR"}, "strategy='NEAR': expected one of Ray's placement strategies"),
        ({"server_backups": 1}, "servers=0, server_backups=1"),
        ({"flags": ("--rdzv_id=x",)}, "'--rdzv_id=x' is set by shoal.ray.run itself"),
        ({"flags": ("--no-fail-fast",)}, "'--no-fail-fast' is set by"),
    ],
)
def test_invalid_settings_are_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        plan(**changes)


def test_servers_with_an_external_coordinator_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="servers=1 is not supported with coordinator='head:7000'"
    ):
        shoal.ray.run("train.py", servers=1, coordinator="head:7000")


def test_missing_ray_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_missing(monkeypatch, "ray")
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[ray\]'") as raised:
        shoal.ray.run("train.py")
    assert raised.value.reason == "RAY_NOT_INSTALLED"


def test_ray_is_imported_only_when_needed() -> None:
    code = (
        "import sys, shoal, shoal.ray, shoal.ray.command; shoal.ray.run; sys.exit('ray' in "
        "sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
