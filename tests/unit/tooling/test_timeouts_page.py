"""The page about elastic training names each timeout with the default value in the code."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from shoal.launcher.workers.settings import NodeRange, RunSettings
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_worker.checkpoint import shards, writer
from shoal_worker.elastic.coordinator import stall_watch
from shoal_worker.elastic.session.session import LAST_STEP_PATIENCE
from shoal_worker.settings import WorkerSettings

_PAGE: Final = Path(__file__).parents[3] / "docs" / "elastic.md"
_UNITS: Final = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "day": 86400}
_SPEC: Final = JobSpec(job_id="job", min_workers=1, max_workers=1)
_POLICY: Final = Policy()


def worker(name: str) -> float:
    return float(WorkerSettings.model_fields[name.removeprefix("SHOAL_").lower()].default)


def run(**given: Any) -> RunSettings:
    return RunSettings(
        command=("true",), program="true", job_id="job", workers=1, endpoint="localhost:1", **given
    )


def policy(*names: str) -> list[float]:
    return [getattr(_POLICY, name) / 1000 for name in names]


def join_graces() -> list[float]:
    return [
        run(nodes=nodes).effective_join_grace.total_seconds()
        for nodes in (NodeRange(1, 2), NodeRange(2, 2))
    ]


WORKERS: Final = (
    "SHOAL_COLLECTIVE_TIMEOUT_S",
    "SHOAL_CONNECT_TIMEOUT_S",
    "SHOAL_RENDEZVOUS_TIMEOUT_S",
    "SHOAL_AWAY_TIMEOUT_S",
    "SHOAL_DRAIN_GRACE_S",
)
SECONDS: Final[dict[str, list[float]]] = {
    **{f"`{name}`": [worker(name)] for name in WORKERS},
    "`--shutdown-timeout`": [
        run(nodes=NodeRange(1, 1)).shutdown_grace(elastic=elastic).total_seconds()
        for elastic in (True, False)
    ],
    "join grace (`last_call_timeout`, `join_grace_ms`)": join_graces(),
    "`join_timeout`": [run(nodes=NodeRange(1, 1)).join_timeout.total_seconds()],
    "heartbeat interval": [_SPEC.heartbeat_interval_ms / 1000],
    "lease (`lease_ms`)": [_SPEC.lease_ms / 1000],
    "closed stream (`closed_within_ms`)": policy("closed_within_ms"),
    "absence (`absence_ms`; `quiet_absence_ms` for launchers)": policy(
        "absence_ms", "quiet_absence_ms"
    ),
    "stall (`stall_timeout_ms`)": [_SPEC.stall_timeout_ms / 1000],
    "explaining a stalled step (`explain_after_ms`, `explain_again_ms`)": policy(
        "explain_after_ms", "explain_again_ms"
    ),
    "looking for peers out of reach": [stall_watch.LOOK_AFTER_S, stall_watch._LOOK_AGAIN_S],
    "kept out (`kept_out_ms`, `longest_kept_out_ms`)": policy("kept_out_ms", "longest_kept_out_ms"),
    "straggler (`straggler_after_ms`, `straggler_until_ms`)": policy(
        "straggler_after_ms", "straggler_until_ms"
    ),
    "deaths of a machine (`deaths_window_ms`, `deaths_apart_ms`)": policy(
        "deaths_window_ms", "deaths_apart_ms"
    ),
    "settling (`settle_ms`, `longest_settle_ms`)": policy("settle_ms", "longest_settle_ms"),
    "settling after a time-out (`timeout_settle_ms`)": policy("timeout_settle_ms"),
    "reconnecting (`reconnect_ms`)": policy("reconnect_ms"),
    "step boundary (`boundary_patience_ms`)": policy("boundary_patience_ms"),
    "last step": [LAST_STEP_PATIENCE.total_seconds()],
    "a peer's disk": [shards._TIMEOUT.total_seconds()],
}


def table() -> dict[str, str]:
    """Returns the page's timeouts with their defaults."""
    lines = _PAGE.read_text().partition("## What each timeout means")[2].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return {row[0]: row[1] for row in rows[2:]}


def test_the_page_has_each_timeout_and_no_other() -> None:
    assert sorted(table()) == sorted(SECONDS)


def test_defaults_on_the_page_match_the_code(subtests: pytest.Subtests) -> None:
    defaults = table()
    for name, expected in SECONDS.items():
        with subtests.test(name):
            values = re.findall(r"(\d+(?:\.\d+)?) (ms|s|min|h|day)\b", defaults[name])
            assert [float(number) * _UNITS[unit] for number, unit in values] == pytest.approx(
                expected
            )


def test_prose_of_the_page_matches_the_code() -> None:
    assert writer.DISK_PATIENCE == shards._TIMEOUT
    assert Policy().fresh_generation_ms == 10_000
    for lease_ms, expected in ((500, 50), (3_000, 300), (600_000, 1_000)):
        assert (
            JobSpec(
                job_id="job", min_workers=1, max_workers=1, lease_ms=lease_ms
            ).heartbeat_interval_ms
            == expected
        )
    assert timedelta(days=1).total_seconds() == worker("SHOAL_AWAY_TIMEOUT_S")
