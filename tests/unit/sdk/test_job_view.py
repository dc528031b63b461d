"""What `shoal status` and `shoal up` say of a job: without members, and when it stands."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from shoal.cli.view import job_json, job_view
from shoal_protos.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(("generation", "expected"), [(0, "no members yet: workers join when"), (2, "no members any more")])
def test_a_job_without_members_has_none_yet_or_none_any_more(generation: int, expected: str) -> None:
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", min_workers=1, max_workers=3), phase=pb.JOB_PHASE_WAITING, generation=pb.Generation(number=generation)
    )
    written = io.StringIO()
    Console(file=written, width=140).print(job_view(job))
    headline, hint = written.getvalue().splitlines()
    assert headline == f"job j  waiting, generation {generation}, 0 of 3 workers have a rank"
    assert hint.startswith(expected)


def shown(job: pb.GetJobResponse) -> str:
    written = io.StringIO()
    Console(file=written, width=200).print(job_view(job))
    return written.getvalue()


def member(rank: int, *, note: str = "", **progress: Any) -> pb.MemberStatus:
    return pb.MemberStatus(
        member_id=f"m{rank}", phase=pb.MEMBER_PHASE_RANKED, rank=rank, host=f"h{rank}", pid=1, note=note, progress=pb.Progress(**progress)
    )


def test_a_step_that_stands_is_explained_above_the_ranks_that_wait() -> None:
    why = "generation 1 stands at step 7: rank 0 (h0) has waited 12 s in all_reduce for rank 1 (h1), not heard of for 13 s"
    members = [
        member(0, step=7, step_time_s=12.0, busy_time_s=0.1, waiting_s=12.0),
        member(1, step=7, step_time_s=0.2, busy_time_s=0.1, note="not heard of for 13 s"),
    ]
    job = pb.GetJobResponse(spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members, waits_for=why)
    lines = shown(job).splitlines()
    assert lines[1] == why
    assert lines[3].split()[-3:] == ["ms", "12", "s"]
    assert lines[4].split()[-1] == "50%"
    assert lines[5] == "rank 1 (h1): not heard of for 13 s"
    told = job_json(job)
    assert told["waits_for"] == why
    assert [m["note"] for m in told["members"]] == [None, "not heard of for 13 s"]


def test_servers_are_shown_with_what_they_hold_and_whether_they_leave() -> None:
    servers = [
        pb.ServerStatus(server_id="s0", server_index=0, alive=True, role=pb.SERVER_ROLE_PRIMARY, partitions=12, value_bytes=90 << 20),
        pb.ServerStatus(server_id="s1", server_index=2, role=pb.SERVER_ROLE_PRIMARY, draining=True, partitions=1, value_bytes=8 << 20),
    ]
    job = pb.GetJobResponse(spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, servers=servers)
    rows = [line.split() for line in shown(job).splitlines()[-2:]]
    assert rows == [
        ["0", "primary", "s0", "-", "alive", "12", "90.0", "MiB"],
        ["2", "primary", "s1", "-", "gone,", "draining", "1", "8.0", "MiB"],
    ]
    told = [(server["partitions"], server["value_bytes"], server["draining"]) for server in job_json(job)["servers"]]
    assert told == [(12, 90 << 20, False), (1, 8 << 20, True)]


def test_a_rank_that_holds_the_others_back_is_named_once() -> None:
    note = "rank 0 (h0) and rank 1 (h1) wait for the connection between them: it takes 0.6 MB/s"
    members = [member(rank, step=7, step_time_s=8.0, busy_time_s=0.2, note=note) for rank in (0, 1)]
    job = pb.GetJobResponse(spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members)
    assert shown(job).splitlines()[-1] == note
    assert shown(job).count("wait for the connection") == 1


def test_the_run_and_how_the_last_ones_ended_are_shown() -> None:
    past = [
        pb.RunStatus(
            run=pb.RunId(number=number, began_unix_ms=1000),
            ended_unix_ms=61_000,
            ending=pb.JOB_ENDING_FAILED if number == 7 else pb.JOB_ENDING_COMPLETED,
            ending_reason="rank 1 on h1: ValueError" if number == 7 else "",
        )
        for number in range(1, 8)
    ]
    spec = pb.JobSpec(job_id="j", max_workers=2)
    job = pb.GetJobResponse(
        spec=spec, phase=pb.JOB_PHASE_WAITING, run=pb.RunId(number=8, began_unix_ms=90_000), past_runs=past, now_unix_ms=121_000
    )
    lines = shown(job).splitlines()
    assert lines[0].startswith("job j, run 8  waiting")
    assert lines[-1] == "run 7 failed 0:01:00 ago, after 0:01:00: rank 1 on h1: ValueError"
    assert [line.split()[1] for line in lines if line.startswith("run ")] == ["3", "4", "5", "6", "7"]
    told = job_json(job)
    assert told["run"] == 8
    assert told["past_runs"][-1] == {
        "run": 7,
        "began_unix_ms": 1000,
        "ended_unix_ms": 61_000,
        "ending": "failed",
        "reason": "rank 1 on h1: ValueError",
    }
