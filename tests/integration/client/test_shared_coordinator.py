"""`shoal.Client` with a coordinator that several launchers share and that requires tokens,
including jobs that other clients started."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.client import Client
from shoal.launcher.clusters.cluster import Service
from shoal.launcher.processes.process import stop_all
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import AuthenticationError, PermissionDeniedError, UnknownResourceError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1.coordinator_pb2 import JobSpec

from tests.integration.client.waiting import WAIT, until_ranked

Shell = Any  # of tests/integration/conftest.py
ADMIN, VIEWER = "a" * 32, "v" * 32


@pytest.fixture
def coordinator(here: Shell, tmp_path: Path) -> Iterator[str]:
    """The coordinator's host:port."""
    directory = tmp_path / "coordinator"
    directory.mkdir()
    tokens = directory / "tokens"
    tokens.write_text(f"admin: {ADMIN}\nviewer: {VIEWER}\n")
    tokens.chmod(0o600)
    arguments = ["--redis", f"embedded://{directory / 'redis'}", "--tokens", str(tokens)]
    service = Service(
        "coordinator",
        "shoal_coordinator",
        arguments,
        directory=directory,
        environment=here.environment,
    )
    service.start()
    service.wait_ready(WAIT)
    yield service.address
    stop_all([service.child], grace=timedelta(seconds=10))
    service.release()


def test_jobs_are_submitted_to_a_shared_coordinator_with_the_clients_token(
    here: Shell, coordinator: str, elastic_worker: Path
) -> None:
    with Client(ChannelSettings(address=coordinator, token=ADMIN)) as client, Client() as local:
        job_id = client.submit(elastic_worker, str(here.directory / "finish"), workers=2)
        until_ranked(client, job_id, 2)
        assert [each.job_id for each in client.jobs()] == [job_id]
        status, out, err = here.run("jobs", "--coordinator", coordinator, SHOAL_TOKEN=VIEWER)
        assert (status, job_id in out) == (0, True), err
        with Client(ChannelSettings(address=coordinator, token=VIEWER)) as reader:
            assert reader.job(job_id).world_size == 2
            assert next(reader.events(job_id)).kind == "job_created"
            for refused in (lambda: reader.stop(job_id), lambda: reader.drain(job_id, rank=0)):
                with pytest.raises(PermissionDeniedError):
                    refused()
        with Client(coordinator) as stranger, pytest.raises(AuthenticationError):
            stranger.jobs()
        (here.directory / "finish").touch()
        assert client.wait(job_id, timeout=WAIT).exit_status == 0
        assert local.result(job_id).ok


def test_jobs_started_by_others_can_be_awaited(
    here: Shell, coordinator: str, elastic_worker: Path
) -> None:
    flags = ("--rdzv-endpoint", coordinator, "--rdzv-id", "theirs", "--nproc-per-node", "2")
    launcher = here.start(
        "run", *flags, elastic_worker, here.directory / "finish", SHOAL_TOKEN=ADMIN
    )
    with Client(ChannelSettings(address=coordinator, token=ADMIN)) as client:
        launcher.wait_for_output("generation 1 rank 0", "generation 1 rank 1")
        assert client.outcome("theirs") is None
        with pytest.raises(
            UnknownResourceError, match="the output of job 'theirs' is not stored on this machine"
        ):
            client.logs("theirs")
        with pytest.raises(UnknownResourceError, match="you have not submitted job"):
            client.kill("theirs")
        client.stop("theirs", reason="enough of it")
        result = client.wait("theirs", timeout=WAIT)
        assert (result.ok, result.exit_status) == (True, None)
        assert "enough of it" in result.summary
        assert launcher.wait() == 0


def test_job_that_has_not_started_is_reported_as_waiting(coordinator: str) -> None:
    settings = ChannelSettings(address=coordinator, token=ADMIN)
    with CoordinatorClient(settings) as raw, Client(settings) as client:
        raw.create_job(JobSpec(job_id="waiting", min_workers=2, max_workers=3))
        job = client.job("waiting")
        assert (job.phase, job.min_workers, job.max_workers, job.members) == ("waiting", 2, 3, ())
