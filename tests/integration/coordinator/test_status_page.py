"""The status page's JSON from a real coordinator, and who may read it.
test_status_page_in_browser.py tests how a browser shows it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from shoal.cli.terminal.view import job_json
from shoal.client import Client
from shoal_common.redis import EmbeddedRedis, connect
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator, Job, Server, create_job, eventually
from tests.zygote.children import Zygote

MakeJob = Callable[..., Job]


def answer(
    coordinator: Coordinator, path: str, *, token: str = ""
) -> tuple[int, str, dict[str, str]]:
    """Returns status, text and headers."""
    request = Request(
        f"http://{coordinator.ports['http']}{path}",
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urlopen(request, timeout=60) as page:
            return page.status, page.read().decode(), dict(page.headers)
    except HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def received(coordinator: Coordinator, path: str, *, token: str = "") -> Any:
    """Returns the JSON at a path. Browsers cannot read NaN."""
    status, text, headers = answer(coordinator, path, token=token)
    assert status == HTTPStatus.OK, text
    assert headers["Content-Type"] == "application/json"
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def of(coordinator: Coordinator, job: Job) -> Any:
    return received(coordinator, f"/api/job?job={job.job_id}")


def test_job_is_reported_with_its_ranks_and_their_progress(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    job = make_job(together=2, smallest=2)
    a, b = job.form("a", "b", host="h7", pid=41)
    a.beat(
        1,
        sequence=1,
        step=9,
        loss=0.5,
        samples_per_s=100,
        step_time_s=0.1,
        busy_time_s=0.05,
        metrics={"accuracy": 0.75, "lr": math.nan},
        upload_backlog_bytes=5_000_000,
    )
    b.beat(1, sequence=1, step=7, loss=math.nan, samples_per_s=50)
    seen = eventually(
        lambda: (
            (now := of(shared_coordinator, job))["members"][1]["step"] == 7
            and now["newest_step"] == 9
            and now
        ),
        "beats",
    )
    assert (seen["phase"], seen["run"], seen["generation"], seen["world_size"]) == (
        "running",
        1,
        1,
        2,
    )
    assert (seen["min_workers"], seen["max_workers"], seen["members_total"], seen["waits_for"]) == (
        2,
        2,
        2,
        None,
    )
    first, second = seen["members"]
    assert (first["rank"], first["member_id"], first["host"], first["pid"], first["phase"]) == (
        0,
        "a",
        "h7",
        41,
        "ranked",
    )
    assert (first["loss"], first["steps_behind"], first["samples_per_s"]) == (0.5, 0, 100)
    assert [each["upload_backlog_bytes"] for each in (first, second)] == [5_000_000, 0]
    assert (second["loss"], second["steps_behind"]) == (None, 2)
    assert (first["metrics"], second["metrics"]) == ({"accuracy": 0.75, "lr": None}, {})
    listed = {each["job_id"]: each for each in received(shared_coordinator, "/api/jobs")["jobs"]}[
        job.job_id
    ]
    assert (listed["world_size"], listed["newest_step"], listed["phase"]) == (2, 9, "running")
    history = eventually(
        lambda: [p for p in of(shared_coordinator, job)["history"] if p[1] == 9],
        "a point of the history",
    )
    assert history[-1][1:] == [9, 0.5, 150, 2]


def test_fields_have_the_names_of_shoal_status(
    make_job: MakeJob, make_server: Callable[..., Server], shared_coordinator: Coordinator
) -> None:
    job = make_job(together=1, parameter_servers=1)
    job.form("a")
    make_server(job, "s0").received("welcome")
    with Client(ChannelSettings(address=shared_coordinator.address)) as client:
        as_status = job_json(client.job(job.job_id))
    seen = of(shared_coordinator, job)
    assert as_status.keys() <= seen.keys()
    for part in ("members", "servers"):
        assert as_status[part][0].keys() - {"metrics_address"} <= seen[part][0].keys()
    same = (
        "job_id",
        "run",
        "phase",
        "ending",
        "ending_reason",
        "generation",
        "world_size",
        "min_workers",
        "max_workers",
        "waits_for",
        "newest_step",
        "steps_in_all",
    )
    assert {name: as_status[name] for name in same} == {name: seen[name] for name in same}


def test_events_are_reported_starting_with_the_newest(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    job = make_job(together=2)
    a, b = job.form("a", "b")
    path = f"/api/events?job={job.job_id}"
    before = received(shared_coordinator, path)["events"]
    assert [event["kind"] for event in before] == [event.kind for event in job.events()]
    assert before[-1]["attributes"]["world_size"] == "2"
    b.kill()
    a.generation(lambda g: g.number == 2)
    after = received(shared_coordinator, f"{path}&after={before[-1]['event_id']}")["events"]
    assert [event["kind"] for event in after] == ["member_lost", "generation_formed"]
    assert (after[0]["member_id"], after[0]["run"]) == ("b", 1)
    assert received(shared_coordinator, f"{path}&after={after[-1]['event_id']}")["events"] == []


def test_parameter_servers_are_reported_with_their_contents(
    make_job: MakeJob, make_server: Callable[..., Server], shared_coordinator: Coordinator
) -> None:
    job = make_job(parameter_servers=2, parameter_server_backups=1)
    server = make_server(job, "s0")
    server.received("welcome")
    server.beat()
    seen = eventually(
        lambda: (now := of(shared_coordinator, job))["servers"][0]["stored_bytes"] == 8 and now,
        "the server's heartbeat",
    )
    assert seen["servers"] == [
        {
            "server_index": 0,
            "role": "primary",
            "in_sync": False,
            "server_id": "s0",
            "address": "s0:7000",
            "alive": True,
            "draining": False,
            "partitions": 0,
            "value_bytes": 0,
            "stored_bytes": 8,
        }
    ]
    assert (seen["unserved_places"], seen["unprotected_places"]) == (1, 1)


def test_noteworthy_ranks_of_a_large_job_are_listed_first(
    make_job: MakeJob, shared_coordinator: Coordinator
) -> None:
    from shoal_coordinator.page.values import MOST_MEMBERS

    size = MOST_MEMBERS + 4
    job = make_job(together=size, largest=size)
    members = [job.join(f"m{number:03}", index=number) for number in range(size)]
    for member in members:
        member.welcome()
        member.ready()
    members[0].generation()
    last = re.compile(rf"for rank {size - 1} \(h1\)")
    beats, due = itertools.count(1), time.monotonic()

    def explained() -> Any:
        """Returns the job once its page names only the last rank. Members that stop sending
        heartbeats are reported as silent instead."""
        nonlocal due
        if time.monotonic() >= due:
            sequence = next(beats)
            for member in members[:-1]:
                member.beat(1, sequence=sequence, step=1, waiting_s=11, waiting_in="all_reduce")
            members[-1].beat(1, sequence=sequence, step=0)
            due = time.monotonic() + 2
        now = of(shared_coordinator, job)
        return last.search(now["waits_for"] or "") and now

    seen = eventually(explained, "the page to name the rank that the others wait for")
    assert (seen["members_total"], len(seen["members"])) == (size, MOST_MEMBERS)
    assert [member["rank"] for member in seen["members"]] == sorted(
        member["rank"] for member in seen["members"]
    )


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/job", HTTPStatus.BAD_REQUEST, "needs the id of a job, as in /api/job?job=train"),
        ("/api/job?job=no/job", HTTPStatus.BAD_REQUEST, "job_id='no/job'"),
        ("/api/job?job=nobody-knows", HTTPStatus.NOT_FOUND, "there is no job 'nobody-knows'"),
        ("/api/events?job=nobody-knows", HTTPStatus.NOT_FOUND, "there is no job 'nobody-knows'"),
        ("/api/none", HTTPStatus.NOT_FOUND, "/api/events, /api/job, /api/jobs"),
    ],
)
def test_unknown_jobs_and_wrong_queries_are_refused(
    shared_coordinator: Coordinator, path: str, status: int, says: str
) -> None:
    found, text, _ = answer(shared_coordinator, path)
    assert (found, says in text) == (status, True), text


def test_invalid_event_id_is_refused(make_job: MakeJob, shared_coordinator: Coordinator) -> None:
    status, text, _ = answer(
        shared_coordinator, f"/api/events?job={make_job().job_id}&after=yesterday"
    )
    assert (status, "yesterday" in text) == (HTTPStatus.BAD_REQUEST, True), text


def test_while_redis_is_away_jobs_are_reported_and_events_are_not(
    own_redis: EmbeddedRedis, make_coordinator: Callable[..., Coordinator]
) -> None:
    coordinator = make_coordinator("--redis", own_redis.url, "--request-timeout", "500ms")
    with coordinator.client() as client, connect(own_redis.url) as redis:
        job = create_job(coordinator, client, together=1)
        job.form("a")
        process = redis.info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        try:
            assert of(coordinator, job)["world_size"] == 1
            status, text, _ = answer(coordinator, f"/api/events?job={job.job_id}")
            assert (status, "Redis" in text) == (HTTPStatus.SERVICE_UNAVAILABLE, True), text
        finally:
            os.kill(process, signal.SIGCONT)
        assert received(coordinator, f"/api/events?job={job.job_id}")["events"]
        job.close()


# ----------------------------------------------------------------------------------- who may see it


@pytest.fixture(scope="module")
def guarded(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that requires tokens."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "tokens").write_text(
        "admin: a-token\nviewer: v-token\nworker: w-token\nviewer@train: t-token\n"
    )
    coordinator = Coordinator(zygote, directory, "--tokens", str(directory / "tokens")).start()
    yield coordinator
    coordinator.close()


@pytest.mark.parametrize("path", ["/api/jobs", "/api/job?job=train", "/api/events?job=train"])
def test_cluster_state_is_shown_to_token_holders_only_as_metrics_are(
    guarded: Coordinator, path: str
) -> None:
    with guarded.client(token="a-token") as client:
        client.create_job(pb.JobSpec(job_id="train", min_workers=1, max_workers=1))
    for token in ("", "another"):
        for each in (path, "/metrics"):
            status, text, headers = answer(guarded, each, token=token)
            assert (status, headers["WWW-Authenticate"]) == (HTTPStatus.UNAUTHORIZED, "Bearer")
            assert "train" not in text
    for token in ("v-token", "w-token", "a-token"):
        assert "train" in json.dumps(
            received(guarded, path, token=token)
        ) or "job_created" in json.dumps(received(guarded, path, token=token))


def test_token_for_one_job_shows_only_that_job(guarded: Coordinator) -> None:
    with guarded.client(token="a-token") as client:
        for job_id in ("train", "another"):
            client.create_job(pb.JobSpec(job_id=job_id, min_workers=1, max_workers=1))
    assert {job["job_id"] for job in received(guarded, "/api/jobs", token="v-token")["jobs"]} == {
        "train",
        "another",
    }
    assert {job["job_id"] for job in received(guarded, "/api/jobs", token="t-token")["jobs"]} == {
        "train"
    }
    for path in ("/api/job", "/api/events"):
        assert received(guarded, f"{path}?job=train", token="t-token")
        status, text, _ = answer(guarded, f"{path}?job=another", token="t-token")
        assert (status, "for job 'train', not 'another'" in text) == (
            HTTPStatus.FORBIDDEN,
            True,
        ), text
    assert answer(guarded, "/sd", token="t-token")[0] == HTTPStatus.FORBIDDEN


def test_page_itself_contains_no_cluster_state_and_requires_no_token(
    guarded: Coordinator,
) -> None:
    status, text, headers = answer(guarded, "/")
    assert (status, headers["Content-Type"]) == (HTTPStatus.OK, "text/html; charset=utf-8")
    assert (
        text
        == (
            Path(__file__).resolve().parents[3] / "coordinator/shoal_coordinator/page/status.html"
        ).read_text()
    )


def test_page_loads_nothing_from_other_hosts_and_runs_only_its_own_code(
    shared_coordinator: Coordinator,
) -> None:
    _, text, headers = answer(shared_coordinator, "/")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, which nobody fetches"
    assert "innerHTML" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
