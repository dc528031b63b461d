"""Selects the coordinator and the job that a command refers to, from flags or the environment,
otherwise from the newest cluster on this machine.

If there are several candidates, or none that responds, the module explains on standard error how to
choose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.reach import find_obstacle

from shoal.client import Client
from shoal.launcher.clusters.registry import ClusterRecord, newest_cluster, running_clusters
from shoal.launcher.processes.credentials import channel_settings
from shoal.launcher.report.history import History, Outcome, RecordedRun

_MOST_NAMED = 5
_RECORDING_S = 5.0
"""Maximum time in seconds for a launcher to record the outcome of its run after its cluster has
ended."""
_NOT_A_COORDINATORS = (
    UnavailableError.default_reason,
    DeadlineError.default_reason,
    "UNIMPLEMENTED",
)
"""Reasons of errors that occur if no program, or a different program, listens at an address."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The job that a command refers to, and its coordinator."""

    client: Client
    job_id: str
    page: str = ""
    """URL of the job's status page; empty if unknown, as for an explicitly given coordinator."""


def past_run(run: str | None, coordinator: str | None, job: str | None) -> RecordedRun | None:
    """Returns the past run that a command refers to; None if the command refers to a coordinator.

    This is the run named `run`. If no run is named and no cluster is running on this machine, it is
    the most recent finished run (of the job, if one is given). Raises UnknownResourceError.
    """
    if run is not None:
        if coordinator or job:
            raise ConfigurationError(
                f"--run {run} selects a past run; omit --coordinator (SHOAL_COORDINATOR) and --job "
                "(SHOAL_JOB_ID)"
            )
        return History().find(run)
    if coordinator or any(job in (None, each.job_id) for each in running_clusters()):
        return None
    deadline = time.monotonic() + _RECORDING_S
    while True:
        try:
            newest = History().newest(job)
        except ConfigurationError:
            return None  # without a home directory, no runs are recorded
        if newest is None or newest.outcome is not Outcome.RUNNING:
            return newest
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)  # the cluster has ended, and its launcher is recording the outcome


@contextmanager
def target(coordinator: str | None, job: str | None) -> Iterator[Target]:
    """Connects to a coordinator and yields it with a job. If a request in the enclosed block fails
    because the coordinator cannot be reached, the error is explained in the same way as for the
    connection.

    Raises:
        UnknownResourceError: there is no cluster, or no unique job; the message has the remedy.
        UnavailableError: the coordinator does not respond.
        ShoalError: as raised by the client.
    """
    settings: ChannelSettings | None
    http = ""
    if coordinator:
        settings = channel_settings(coordinator)
        address = settings.address
        remedy = (
            "check --coordinator (or SHOAL_COORDINATOR), or omit it to use a cluster on this "
            "machine"
        )
    else:
        record = newest_cluster(job=job)
        if job is None:
            _mention_others(record)
        job, address, http = record.job_id, record.coordinator, record.http
        settings = None
        remedy = f"its launcher (pid {record.pid}) may be exiting, so try again"
    with Client(settings) as client:
        try:
            job_id = job or _only_job(client, address)
            yield Target(
                client=client, job_id=job_id, page=f"http://{http}/#job={job_id}" if http else ""
            )
        except ShoalError as error:
            if error.reason not in _NOT_A_COORDINATORS:
                raise
            obstacle = find_obstacle(settings or ChannelSettings(address=address))
            cause = (
                str(error).rpartition(": ")[2].rstrip("]") if obstacle is None else obstacle.cause
            )
            raise UnavailableError(
                f"cannot reach a coordinator at {address} ({cause}); {remedy}"
            ) from error


def _mention_others(shown: ClusterRecord) -> None:
    others = [record for record in running_clusters() if record.coordinator != shown.coordinator]
    if others:
        named = ", ".join(f"--job {other.job_id}" for other in others[:_MOST_NAMED]) + (
            ", ..." if len(others) > _MOST_NAMED else ""
        )
        typer.echo(
            f"shoal: showing job {shown.job_id} of the newest of {len(others) + 1} clusters on "
            f"this machine; choose another with {named}",
            err=True,
        )


def _only_job(client: Client, address: str) -> str:
    jobs = [summary.job_id for summary in client.jobs()]
    if not jobs:
        raise UnknownResourceError(
            f"the coordinator at {address} has no jobs", reason="JOB_UNKNOWN"
        )
    if len(jobs) > 1:
        raise ConfigurationError(
            f"the coordinator at {address} has {len(jobs)} jobs; choose one with --job "
            f"({', '.join(jobs[:10])})"
        )
    return jobs[0]
