"""Service discovery at `/sd` (http_sd), which Prometheus uses to find the metrics of workers and
parameter servers as they come and go.

A target's labels identify a position that outlives its process: a worker's host and its index on
the host, or a server's id. When ranks are reassigned or a process is restarted, the time series of
that position therefore continue, and `rate()` sees one counter. The process itself exports its
current member and rank: shoal_worker_info, shoal_worker_rank, shoal_worker_generation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from shoal_coordinator.membership.model.state import JobState, Member


def targets(states: Iterable[JobState]) -> list[dict[str, Any]]:
    """Returns Prometheus's http_sd document: one target per position whose process has a metrics
    address, with the labels job_id, role and instance."""
    found: list[dict[str, Any]] = []
    for state in states:
        job_id = state.spec.job_id
        for instance, member in sorted(_places(state)):
            identity = member.identity
            labels = {
                "job_id": job_id,
                "role": "worker",
                "host": identity.host,
                "slot": str(identity.local_index),
                "instance": instance,
            }
            found.append({"targets": [identity.metrics_address], "labels": labels})
        for server in sorted(state.servers.values(), key=lambda s: (s.index, s.server_id)):
            if server.alive and server.metrics_address:
                labels = {
                    "job_id": job_id,
                    "role": "server",
                    "server_id": server.server_id,
                    "server_index": str(server.index),
                }
                found.append(
                    {
                        "targets": [server.metrics_address],
                        "labels": labels | {"instance": server.server_id},
                    }
                )
    return found


def _places(state: JobState) -> Iterator[tuple[str, Member]]:
    """Yields the instance name and the member of each position (host and index on the host).

    If two members have the same position, because a process was replaced before its member was
    evicted, yields the newer member. Several launchers on one host, or members without a launcher,
    may use the same index; the name then also contains the launcher.
    """
    launchers: defaultdict[str, set[str]] = defaultdict(set)
    places: dict[tuple[str, str, str], Member] = {}
    for member in state.members.values():
        identity = member.identity
        if not identity.metrics_address:
            continue
        launcher = identity.launcher_id or identity.member_id
        launchers[identity.host].add(launcher)
        place = (identity.host, launcher, str(identity.local_index))
        other = places.get(place)
        if other is None or (other.joined_unix_ms, other.member_id) < (
            member.joined_unix_ms,
            member.member_id,
        ):
            places[place] = member
    for (host, launcher, slot), member in places.items():
        alone = len(launchers[host]) == 1
        yield f"{host}/{slot}" if alone else f"{host}/{launcher}/{slot}", member
