"""`/sd`: where Prometheus finds the metrics of workers and parameter servers that come and go (its http_sd)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal_coordinator.membership.state import JobPhase, JobState


def targets(states: Iterable[JobState]) -> list[dict[str, Any]]:
    """Prometheus' http_sd document: one target per process that has a metrics address, with labels job_id, role and, with a rank, rank."""
    found: list[dict[str, Any]] = []
    for state in states:
        job_id = state.spec.job_id
        ranks = state.generation.rank_of if state.generation is not None and state.phase is not JobPhase.WAITING else {}
        for member in sorted(state.members.values(), key=lambda m: (ranks.get(m.member_id, len(ranks)), m.member_id)):
            rank = ranks.get(member.member_id)
            labels = {"job_id": job_id, "role": "worker", "member_id": member.member_id, "rank": "" if rank is None else str(rank)}
            found += _target(member.identity.metrics_address, labels)
        for server in sorted(state.servers.values(), key=lambda s: s.index):
            if server.alive:
                labels = {"job_id": job_id, "role": "server", "server_id": server.server_id, "server_index": str(server.index)}
                found += _target(server.metrics_address, labels)
    return found


def _target(address: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    return [{"targets": [address], "labels": labels}] if address else []
