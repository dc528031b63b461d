"""The output of `shoal status` and `shoal up` for a job, including a job without members and a job
during a stall."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console
from shoal.cli.terminal.view import event_line, job_json, job_view, jobs_view, summary_json
from shoal.client import JobPhase, JobSummary, Result
from shoal.client.messages import event_of, job_of
from shoal_protos.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(0, "no members yet: a worker joins when"), (2, "no members left")],
)
def test_job_without_members_distinguishes_not_yet_from_no_longer(
    generation: int, expected: str
) -> None:
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", min_workers=1, max_workers=3),
        phase=pb.JOB_PHASE_WAITING,
        generation=pb.Generation(number=generation),
    )
    written = io.StringIO()
    Console(file=written, width=140).print(job_view(job_of(job)))
    headline, hint = written.getvalue().splitlines()
    assert headline == f"job j  waiting, generation {generation}, 0 of 3 workers have a rank"
    assert hint.startswith(expected)


def shown(job: pb.GetJobResponse, *, width: int = 200) -> str:
    written = io.StringIO()
    Console(file=written, width=width).print(job_view(job_of(job)))
    return written.getvalue()


def member(rank: int, *, note: str = "", **progress: Any) -> pb.MemberStatus:
    return pb.MemberStatus(
        member_id=f"m{rank}",
        phase=pb.MEMBER_PHASE_RANKED,
        rank=rank,
        host=f"h{rank}",
        pid=1,
        note=note,
        progress=pb.Progress(**progress),
    )


def test_stalled_step_is_explained_above_the_waiting_ranks() -> None:
    why = (
        "generation 1 has stalled at step 7: rank 0 (h0) has waited 12 s in all_reduce for rank 1 "
        "(h1), no heartbeat for 13 s"
    )
    members = [
        member(0, step=7, step_time_s=12.0, busy_time_s=0.1, waiting_s=12.0),
        member(1, step=7, step_time_s=0.2, busy_time_s=0.1, note="no heartbeat for 13 s"),
    ]
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2),
        phase=pb.JOB_PHASE_RUNNING,
        members=members,
        waits_for=why,
    )
    lines = shown(job).splitlines()
    assert lines[1] == why
    assert lines[3].split()[-3:] == ["ms", "12", "s"]
    assert lines[4].split()[-1] == "50%"
    assert lines[5] == "rank 1 (h1): no heartbeat for 13 s"
    document = job_json(job_of(job))
    assert document["waits_for"] == why
    assert [m["note"] for m in document["members"]] == [None, "no heartbeat for 13 s"]


def test_the_upload_backlog_is_shown_if_there_is_one() -> None:
    def job(nbytes: int) -> pb.GetJobResponse:
        members = [member(0, step=7, upload_backlog_bytes=nbytes), member(1, step=7)]
        return pb.GetJobResponse(
            spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members
        )

    assert "to upload" in shown(job(3 << 19))
    assert "1.5 MiB" in shown(job(3 << 19))
    assert "to upload" not in shown(job(0))
    document = job_json(job_of(job(3 << 19)))
    assert [m["upload_backlog_bytes"] for m in document["members"]] == [3 << 19, 0]


def test_shares_are_shown_while_micro_batches_are_dealt_by_speed() -> None:
    def job(*shares: float) -> pb.GetJobResponse:
        members = [member(rank, step=7, share=share) for rank, share in enumerate(shares)]
        return pb.GetJobResponse(
            spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members
        )

    header, first, second = (line.split() for line in shown(job(5 / 3, 1 / 3)).splitlines()[1:4])
    assert "share" in header
    assert "1.67" in first
    assert "0.33" in second
    assert "share" not in shown(job(0, 0))
    document = job_json(job_of(job(1.5, 0.5)))
    assert [m["share"] for m in document["members"]] == [1.5, 0.5]


def test_servers_are_shown_with_their_contents_and_whether_they_leave() -> None:
    servers = [
        pb.ServerStatus(
            server_id="s0",
            server_index=0,
            alive=True,
            role=pb.SERVER_ROLE_PRIMARY,
            partitions=12,
            value_bytes=90 << 20,
        ),
        pb.ServerStatus(
            server_id="s1",
            server_index=2,
            role=pb.SERVER_ROLE_PRIMARY,
            draining=True,
            partitions=1,
            value_bytes=8 << 20,
        ),
    ]
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, servers=servers
    )
    rows = [line.split() for line in shown(job).splitlines()[-2:]]
    assert rows == [
        ["0", "primary", "s0", "-", "alive", "12", "90.0", "MiB"],
        ["2", "primary", "s1", "-", "gone,", "draining", "1", "8.0", "MiB"],
    ]
    rows = [
        (server["partitions"], server["value_bytes"], server["draining"])
        for server in job_json(job_of(job))["servers"]
    ]
    assert rows == [(12, 90 << 20, False), (1, 8 << 20, True)]


def test_rank_that_slows_down_the_others_is_named_once() -> None:
    note = "rank 0 (h0) and rank 1 (h1) are waiting for the connection between them"
    members = [member(rank, step=7, step_time_s=8.0, busy_time_s=0.2, note=note) for rank in (0, 1)]
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members
    )
    assert shown(job).splitlines()[-1] == note
    assert shown(job).count("waiting for the connection") == 1


def test_run_and_outcomes_of_the_last_ones_are_shown() -> None:
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
        spec=spec,
        phase=pb.JOB_PHASE_WAITING,
        run=pb.RunId(number=8, began_unix_ms=90_000),
        past_runs=past,
        now_unix_ms=121_000,
    )
    lines = shown(job).splitlines()
    assert lines[0].startswith("job j, run 8  waiting")
    assert lines[-1] == "run 7 failed 0:01:00 ago, after 0:01:00: rank 1 on h1: ValueError"
    assert [line.split()[1] for line in lines if line.startswith("run ")] == [
        "3",
        "4",
        "5",
        "6",
        "7",
    ]
    document = job_json(job_of(job))
    assert document["run"] == 8
    assert document["past_runs"][-1] == {
        "run": 7,
        "began_unix_ms": 1000,
        "ended_unix_ms": 61_000,
        "ending": "failed",
        "reason": "rank 1 on h1: ValueError",
    }


def test_least_important_columns_are_omitted_without_room_and_none_is_truncated() -> None:
    members = [
        member(rank, step=7, loss=0.5, samples_per_s=1000.0, step_time_s=0.02, busy_time_s=0.01)
        for rank in (0, 1)
    ]
    servers = [
        pb.ServerStatus(
            server_id="server-0", alive=True, role=pb.SERVER_ROLE_PRIMARY, address="10.0.0.1:50051"
        )
    ]
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2),
        phase=pb.JOB_PHASE_RUNNING,
        members=members,
        servers=servers,
    )
    everything = [
        "rank",
        "phase",
        "host",
        "pid",
        "epoch",
        "step",
        "samples/s",
        "loss",
        "step",
        "time",
        "waiting",
    ]
    for width, without in (
        (73, ()),
        (72, ("pid",)),
        (67, ("pid", "host")),
        (61, ("pid", "host", "phase")),
    ):
        lines = shown(job, width=width).splitlines()
        assert lines[1].split() == [name for name in everything if name not in without], width
        assert lines[2].split()[-5:] == ["1,000", "0.5", "20.0", "ms", "50%"]
    assert "10.0.0.1" not in shown(job, width=55)
    assert "server-0" in shown(job, width=55)


def test_unreported_loss_is_none() -> None:
    silent, reporting = member(0, step=7, loss=math.nan), member(1, step=7, loss=0.0)
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j"), members=[silent, reporting, pb.MemberStatus(member_id="new")]
    )
    assert [each["loss"] for each in job_json(job_of(job))["members"]] == [None, 0.0, None]


def test_unknown_values_of_a_newer_coordinator_are_not_errors() -> None:
    job = job_of(
        pb.GetJobResponse(
            spec=pb.JobSpec(job_id="j"),
            phase=99,
            ending=98,
            members=[pb.MemberStatus(phase=97, rank=-1)],
        )
    )
    assert (job.phase, job.ending, job.members[0].phase) == ("unknown", "unknown", "unknown")


def test_event_is_one_line_with_the_known_details() -> None:
    event = pb.Event(
        kind="generation_formed",
        generation=3,
        member_id="0123456789",
        attributes={"reason": "2 members are ready", "world_size": "2", "x": ""},
    )
    assert event_line(event_of(event)).plain.partition("  ")[2] == (
        'generation_formed  generation 3  member 01234567  reason="2 members are ready" '
        "world_size=2"
    )


def test_list_of_jobs_shows_known_outcomes() -> None:
    def listed(job_id: str, status: int | None = None, *, known: bool = True) -> JobSummary:
        result = (
            Result(job_id=job_id, ok=status == 0, exit_status=status, summary="", ended=None)
            if known
            else None
        )
        return JobSummary(
            job_id=job_id, phase=JobPhase.FINISHED, generation=0, world_size=0, result=result
        )

    jobs = [listed("a", 0), listed("b", 3), listed("c"), listed("d", known=False)]
    written = io.StringIO()
    Console(file=written, width=80).print(jobs_view(jobs))
    assert [line.split()[4:] for line in written.getvalue().splitlines()[1:]] == [
        ["succeeded"],
        ["with", "status", "3"],
        ["killed"],
        ["-"],
    ]
    assert [
        each["result"] and each["result"]["exit_status"] for each in map(summary_json, jobs)
    ] == [0, 3, None, None]


def test_end_of_a_run_is_shown_with_the_remaining_time() -> None:
    members = [member(rank, step=372 - rank, steps_in_all=2100, step_time_s=0.5) for rank in (0, 1)]
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2), phase=pb.JOB_PHASE_RUNNING, members=members
    )
    assert "step 372 of 2,100 (18%), 0:14:24 left\n" in shown(job)
    assert job_json(job_of(job))["members"][0]["steps_in_all"] == 2100
    for each in job.members:
        each.progress.steps_in_all = 0
    assert " of 0" not in shown(job)


def test_stopped_run_is_shown_with_its_last_step() -> None:
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", max_workers=2),
        phase=pb.JOB_PHASE_FINISHED,
        ending=pb.JOB_ENDING_STOPPED,
        ending_reason="seen enough",
        newest_step=1134,
        steps_in_all=5700,
    )
    first, second = shown(job).splitlines()[:2]
    assert first.endswith("finished, generation 0, stopped at step 1,134 of 5,700")
    assert second == "seen enough"
    assert job_json(job_of(job))["newest_step"] == 1134
