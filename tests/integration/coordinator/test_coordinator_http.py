"""The HTTP endpoints that Prometheus reads: /metrics, /healthz and /sd of a real coordinator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from shoal_common.redis import EmbeddedRedis

from tests.integration.coordinator.harness import Coordinator, Job, create_job, eventually

MakeJob = Callable[..., Job]


def page(coordinator: Coordinator, path: str) -> str:
    with urlopen(f"http://{coordinator.ports['http']}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def value(coordinator: Coordinator, name: str, **labels: str) -> float:
    """Returns a sample's value; 0 if there is no such sample yet."""
    for family in text_string_to_metric_families(page(coordinator, "/metrics")):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return 0.0


def test_service_discovery_lists_processes_that_serve_metrics(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    job = make_job(together=2)

    def mine() -> list[dict[str, Any]]:
        return [
            target
            for target in json.loads(page(shared_coordinator, "/sd"))
            if target["labels"]["job_id"] == job.job_id
        ]

    for index, name in enumerate("abc"):
        job.start(name, index=index)
    eventually(lambda: len(mine()) == 3, "three targets")
    before = mine()
    assert [(*target["targets"], target["labels"]["instance"]) for target in before] == [
        ("127.0.0.1:9", f"h1/{slot}") for slot in range(3)
    ]
    assert not {"rank", "member_id"} & before[0]["labels"].keys()
    job.members[0].kill()
    job.start("d", index=0)
    eventually(
        lambda: "d" in {member.member_id for member in job.get().members},
        "another process in the place of the first",
    )
    assert mine() == before


def test_metrics_report_generations_members_and_losses(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    job = make_job(together=2)
    before = value(
        shared_coordinator, "shoal_coordinator_generations_formed_total", cause="failure"
    )
    announced = value(shared_coordinator, "shoal_coordinator_loss_to_announcement_seconds_count")
    beats = value(shared_coordinator, "shoal_coordinator_heartbeats_total", kind="member")
    a, b = job.form("a", "b")
    eventually(
        lambda: (
            value(shared_coordinator, "shoal_coordinator_heartbeats_total", kind="member")
            >= beats + 2
        ),
        "two heartbeats to be counted",
    )
    assert (
        value(shared_coordinator, "shoal_coordinator_members", job_id=job.job_id, phase="ranked")
        == 2
    )
    assert value(shared_coordinator, "shoal_coordinator_world_size", job_id=job.job_id) == 2
    assert value(shared_coordinator, "shoal_coordinator_sessions", kind="member") >= 2
    b.kill()
    a.generation(lambda g: g.number == 2)
    eventually(
        lambda: (
            value(shared_coordinator, "shoal_coordinator_generations_formed_total", cause="failure")
            == before + 1
        ),
        "the generation to be counted",
    )
    assert (
        value(shared_coordinator, "shoal_coordinator_loss_to_announcement_seconds_count")
        == announced + 1
    )
    assert value(shared_coordinator, "shoal_coordinator_generation", job_id=job.job_id) == 2
    assert (
        value(
            shared_coordinator, "shoal_coordinator_members_departed_total", ending="stream_broken"
        )
        >= 1
    )
    assert value(shared_coordinator, "shoal_coordinator_redis_up") == 1
    assert value(shared_coordinator, "shoal_coordinator_commit_seconds_count") > 0


def test_every_metric_has_a_help_text_and_the_services_prefix(
    shared_coordinator: Coordinator,
) -> None:
    families = list(text_string_to_metric_families(page(shared_coordinator, "/metrics")))
    own = [family for family in families if family.name.startswith("shoal_coordinator_")]
    assert len(own) >= 14
    assert all(family.documentation.endswith(".") for family in own)
    shared = ("grpc_", "shoal_event_loop_")
    assert all(family.name.startswith(("shoal_coordinator_", *shared)) for family in families)


def test_metrics_and_the_log_report_a_blocked_event_loop(
    make_coordinator: Callable[..., Coordinator], own_redis: EmbeddedRedis
) -> None:
    failpoint = {"SHOAL_FAILPOINTS": "decision.before_write@1=hang"}
    coordinator = make_coordinator("--redis", own_redis.url, environment=failpoint)
    before = value(coordinator, "shoal_event_loop_blocked_seconds_total")
    with coordinator.client() as client:
        job = create_job(coordinator, client)
        job.join("a")
        eventually(
            lambda: value(coordinator, "shoal_event_loop_blocked_seconds_total") > before + 5,
            "the blocked time to be counted",
        )
        eventually(
            lambda: "the event loop of the coordinator has been blocked for" in coordinator.log,
            "the stack of the blocked loop",
        )
        assert "in _commit" in coordinator.log
        job.close()
    coordinator.kill()  # SIGTERM would wait for the event loop


def test_health_is_ok_while_the_coordinator_serves(shared_coordinator: Coordinator) -> None:
    assert page(shared_coordinator, "/healthz") == "ok\n"


def test_metrics_report_a_stalled_step(make_job: MakeJob, shared_coordinator: Coordinator) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    assert value(shared_coordinator, "shoal_coordinator_step_stands", job_id=job.job_id) == 0
    a.beat(1, waiting_s=11, waiting_in="all_reduce")
    a.received("notice")
    assert value(shared_coordinator, "shoal_coordinator_step_stands", job_id=job.job_id) == 1
    a.beat(1, sequence=4)
    b.beat(1, sequence=4)
    a.received("notice", lambda notice: not notice.text)
    assert value(shared_coordinator, "shoal_coordinator_step_stands", job_id=job.job_id) == 0
