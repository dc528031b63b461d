"""Which coordinator and job a command is about: named by flags or the environment, else the newest cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import ConfigurationError, UnknownResourceError
from shoal_common.rpc.channel import ChannelSettings

from shoal.launcher.credentials import channel_settings
from shoal.launcher.registry import newest_cluster


@dataclass(frozen=True, kw_only=True)
class Target:
    """A job at a coordinator that answers."""

    client: CoordinatorClient
    job_id: str


@contextmanager
def target(coordinator: str | None, job: str | None) -> Iterator[Target]:
    """Connects. Raises UnknownResourceError with the remedy where there is no cluster or no one job to mean; ShoalErrors of the channel."""
    if coordinator:
        settings = channel_settings(coordinator)
    else:
        record = newest_cluster(job=job)
        job = record.job_id
        settings = ChannelSettings(address=record.coordinator)
    with CoordinatorClient(settings) as client:
        yield Target(client=client, job_id=job or _only_job(client, settings.address))


def _only_job(client: CoordinatorClient, address: str) -> str:
    jobs = [str(summary.job_id) for summary in client.list_jobs().jobs]
    if not jobs:
        raise UnknownResourceError(f"the coordinator at {address} has no jobs", reason="JOB_UNKNOWN")
    if len(jobs) > 1:
        raise ConfigurationError(f"the coordinator at {address} has {len(jobs)} jobs: name one with --job ({', '.join(sorted(jobs)[:10])})")
    return jobs[0]
