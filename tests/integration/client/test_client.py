"""`shoal.Client` and `shoal.AsyncClient` with clusters on this machine: jobs are submitted,
inspected and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.client import AsyncClient, Client, JobPhase
from shoal.launcher.run.submissions import Submissions
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)

from tests.integration.client.waiting import WAIT, until_ranked
from tests.zygote.children import eventually

Shell = Any  # of tests/integration/conftest.py


@pytest.fixture
def training(here: Shell, client: Client, elastic_worker: Path) -> str:
    """A submitted job of two workers with ranks, which ends successfully once the file `finish`
    exists."""
    job_id = client.submit(
        elastic_worker,
        str(here.directory / "finish"),
        workers=2,
        job_id="digits",
        directory=here.directory,
    )
    until_ranked(client, job_id, 2)
    return job_id


def test_a_submitted_job_is_seen_and_ends_well(here: Shell, client: Client, training: str) -> None:
    job = client.job(training)
    assert (job.job_id, job.phase, job.generation, job.world_size, job.ending) == (
        "digits",
        JobPhase.RUNNING,
        1,
        2,
        None,
    )
    assert [member.rank for member in job.members] == [0, 1]
    assert client.members(training)[0].loss is not None
    assert client.servers(training) == ()
    assert [(each.job_id, each.phase) for each in client.jobs()] == [("digits", "running")]
    assert client.outcome(training) is None
    with pytest.raises(PreconditionError, match="has not ended") as refused:
        client.result(training)
    assert refused.value.reason == "JOB_RUNNING"
    (here.directory / "finish").touch()
    result = client.wait(training, timeout=WAIT)
    assert (result.ok, result.exit_status, result.summary) == (True, 0, "")
    assert result.ended is not None
    assert client.result(training) == result
    assert [(each.job_id, each.phase) for each in client.jobs()] == [("digits", "finished")]
    assert list(client.logs(training, rank=1))[-1] == "[1]: left"
    with pytest.raises(
        UnknownResourceError, match=r"has ended.*client\.result\('digits'\)"
    ) as ended:
        client.job(training)
    assert ended.value.reason == "JOB_ENDED"


def test_another_process_follows_a_submitted_job_and_receives_its_outcome(
    here: Shell, training: str
) -> None:
    logs = here.start("logs", "--follow", "--job", training)
    logs.wait_for_output("generation 1 rank 0 of 2", "generation 1 rank 1 of 2")
    waiting = here.start_program(
        sys.executable,
        here.script(
            f"import shoal\nwith shoal.Client() as c: print(c.wait({training!r}, timeout=None).ok)"
        ),
    )
    (here.directory / "finish").touch()
    assert (waiting.wait(), waiting.stdout) == (0, "True\n"), waiting.stderr
    assert logs.wait() == 0
    assert logs.stdout.count("left") == 2
    status, out, _ = here.run("logs", "--rank", "0")
    assert status == 0
    assert {line[:5] for line in out.splitlines()} == {"[0]: "}


def test_failed_job_reports_its_exit_status_and_exception(here: Shell, client: Client) -> None:
    script = here.script(
        "import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\nimport time; time.sleep(90)"
    )
    job_id = client.submit(script, workers=2)
    result = client.wait(job_id, timeout=WAIT)
    assert (result.ok, result.exit_status) == (False, 3)
    assert "rank      : 1" in result.summary
    assert result.summary in "\n".join(client.logs(job_id)) + "\n"


def test_command_line_errors_are_returned_as_the_result(here: Shell, client: Client) -> None:
    job_id = client.submit(here.script("pass"), flags=["--max-restarts", "-1"])
    result = client.wait(job_id, timeout=WAIT)
    assert (result.ok, result.exit_status, result.summary) == (
        False,
        2,
        "--max-restarts -1: expected 0 or more",
    )


def test_id_is_reused_after_the_previous_run_has_ended(
    here: Shell, client: Client, training: str, elastic_worker: Path
) -> None:
    with pytest.raises(
        PreconditionError, match="job 'digits' is already running on this machine"
    ) as refused:
        client.submit(elastic_worker, job_id=training)
    assert refused.value.reason == "JOB_RUNNING"
    client.kill(training)
    assert client.result(training).exit_status == 143
    client.submit(here.script("print('again')"), job_id=training)
    assert client.wait(training, timeout=WAIT).ok
    assert list(client.logs(training)) == ["[0]: again"]
    assert Submissions().newest(training).run == 2


def test_killed_launcher_leaves_no_status_and_the_result_reports_it(
    client: Client, training: str
) -> None:
    os.kill(Submissions().newest(training).pid, signal.SIGKILL)
    result = client.wait(training, timeout=WAIT)
    assert (result.ok, result.exit_status, result.ended) == (False, None, None)
    assert "is gone and left no result: it was killed" in result.summary


def test_stop_ends_a_job_at_a_step_boundary(client: Client, training: str) -> None:
    client.stop(training, reason="enough")
    assert client.wait(training, timeout=WAIT).exit_status == 0
    assert "[1]: left" in client.logs(training)


def test_job_can_be_stopped_before_it_has_started(
    here: Shell, client: Client, elastic_worker: Path
) -> None:
    job_id = client.submit(elastic_worker, str(here.directory / "finish"), workers=2)
    client.stop(job_id)
    assert client.wait(job_id, timeout=WAIT).exit_status is not None


def test_kill_and_drain_of_a_rank_are_reported_as_events(client: Client, training: str) -> None:
    killed = client.kill(training, rank=1)
    assert killed is not None
    with client.events(training, follow=True, timeout=WAIT) as events:
        lost = next(event for event in events if event.kind == "member_lost")
    assert lost.member_id == killed.member_id
    eventually(
        lambda: client.job(training).generation > 1,
        "a generation without it",
        within_s=WAIT.total_seconds(),
    )
    until_ranked(client, training, 2)
    drained = client.drain(training, rank=0)
    later = client.events(training, after=lost.event_id, follow=True, timeout=WAIT)
    assert next(event for event in later if event.kind == "drain_requested").member_id == drained
    later.close()
    assert list(later) == []
    for wrong in ({}, {"rank": 0, "server": "server-0"}):
        with pytest.raises(ConfigurationError, match="pass one of them"):
            client.drain(training, **wrong)
    with pytest.raises(UnknownResourceError, match="has no rank 7"):
        client.kill(training, rank=7)


def test_followed_events_end_with_the_jobs_cluster_or_when_closed(
    here: Shell, client: Client, training: str
) -> None:
    received: list[str] = []
    with client.events(training, follow=True) as closed:
        assert next(closed).kind == "job_created"
        threading.Timer(0.2, closed.close).start()
        assert [event.kind for event in closed][-1] == "generation_formed"
    thread = threading.Thread(
        target=lambda: received.extend(event.kind for event in client.events(training, follow=True))
    )
    thread.start()
    (here.directory / "finish").touch()
    thread.join(WAIT.total_seconds())
    assert not thread.is_alive()
    assert "job_finished" in received
    assert client.wait(training, timeout=WAIT).ok


def test_every_wait_has_a_deadline_and_names_what_is_missing(
    here: Shell, client: Client, training: str
) -> None:
    short = timedelta(seconds=0.3)
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s for the end of job 'digits'"):
        client.wait(training, timeout=short)
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s for the end of job 'digits'"):
        list(client.logs(training, follow=True, timeout=short))
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s for events of job 'digits'"):
        list(client.events(training, follow=True, timeout=short))
    for call in (client.job, client.outcome, client.stop, client.events):
        with pytest.raises(UnknownResourceError, match="runs job 'other'"):
            call("other")
    with pytest.raises(
        UnknownResourceError, match="the output of job 'other' is not stored on this machine"
    ) as unknown:
        client.logs("other")
    assert unknown.value.reason == "LOG_UNKNOWN"
    with pytest.raises(ConfigurationError, match="the file does not exist in"):
        client.submit("nowhere.py")
    with pytest.raises(ConfigurationError, match=r"job id '\.\./up'"):
        client.submit(here.script("pass"), job_id="../up")
    client.close()
    with pytest.raises(UnavailableError, match="this client is closed"):
        client.job(training)


def test_async_client_behaves_like_the_sync_one(here: Shell, training: str) -> None:
    async def run() -> None:
        async with AsyncClient(timeout=timedelta(seconds=30)) as client:
            assert [each.job_id for each in await client.jobs()] == [training]
            assert len(await client.members(training)) == 2
            assert await client.servers(training) == ()
            with pytest.raises(DeadlineError):
                await client.wait(training, timeout=timedelta(seconds=0.3))

            async def kinds() -> list[str]:
                return [event.kind async for event in client.events(training, follow=True)]

            cancelled = asyncio.create_task(kinds())
            await asyncio.sleep(0)
            cancelled.cancel()
            followed = asyncio.create_task(kinds())
            waits = [asyncio.create_task(client.wait(training, timeout=WAIT)) for _ in range(100)]
            (here.directory / "finish").touch()
            assert all(result.ok for result in await asyncio.gather(*waits))
            assert "job_finished" in await followed
            assert [line async for line in client.logs(training, rank=0)][-1] == "[0]: left"
            assert (
                await client.result(training) == waits[0].result() == await client.outcome(training)
            )
            with pytest.raises(UnknownResourceError):
                await client.job("other")

    asyncio.run(asyncio.wait_for(run(), 2 * WAIT.total_seconds()))


def test_the_asynchronous_client_submits_and_ends_jobs(here: Shell, elastic_worker: Path) -> None:
    async def run() -> None:
        async with AsyncClient(timeout=timedelta(seconds=30)) as client:
            job_id = await client.submit(elastic_worker, str(here.directory / "finish"), workers=2)
            async for event in client.events(job_id, follow=True):
                if event.kind == "generation_formed":
                    break
            await client.drain(job_id, rank=1)
            await client.kill(job_id, rank=0)
            await client.stop(job_id)
            await client.wait(job_id, timeout=WAIT)
            job_id = await client.submit(here.script("import time; time.sleep(90)"))
            await client.kill(job_id)
            assert not (await client.result(job_id)).ok

    asyncio.run(asyncio.wait_for(run(), 3 * WAIT.total_seconds()))
