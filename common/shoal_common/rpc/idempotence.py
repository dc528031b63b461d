"""RPCs that are safe to retry if it is unknown whether the first attempt arrived, and the service
config that makes gRPC retry them.

A test compares the tables with the services' descriptors: every RPC is listed exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

IDEMPOTENT: Final[Mapping[str, frozenset[str]]] = {
    "shoal.v1.Coordinator": frozenset(
        {
            "CreateJob",
            "GetJob",
            "ListJobs",
            "ReportExit",
            "ReportMachine",
            "DrainMember",
            "DrainServer",
            "StopJob",
            "DeclareTensors",
            "GetRanks",
            "GetShardMap",
        }
    ),
    "shoal.v1.ParameterServer": frozenset(
        {
            "ConfigureOptimizer",
            "SetHyperparameters",
            "Pull",
            "ReadRows",
            "OpenData",
            "AdvanceClock",
            "Snapshot",
            "GetServer",
        }
    ),
}
"""Methods, by service, that gRPC itself retries on UNAVAILABLE."""

NOT_REPEATED: Final[Mapping[str, frozenset[str]]] = {
    # Sessions and events have state that the caller must rebuild. A lost answer to LeaseBatches
    # would lease the batches twice.
    "shoal.v1.Coordinator": frozenset(
        {"JoinSession", "ServerSession", "LeaseBatches", "WatchEvents"}
    ),
    # Uploads are safe to repeat because of their sequence numbers, but gRPC would have to keep the
    # entire stream in memory: the caller repeats them. Follow begins with the primary's state at
    # that time.
    "shoal.v1.ParameterServer": frozenset(
        {"Initialize", "Push", "RestoreRows", "Follow", "TakePartitions"}
    ),
}
"""Methods, by service, whose retries are left to the caller."""


def service_config(*, attempts: int, first_backoff: timedelta, longest_backoff: timedelta) -> str:
    """Returns gRPC's JSON service config: idempotent methods get `attempts` attempts (2 to 5) in
    total, on UNAVAILABLE only."""
    names = [
        {"service": service, "method": method}
        for service, methods in IDEMPOTENT.items()
        for method in sorted(methods)
    ]
    policy = {
        "maxAttempts": attempts,
        "initialBackoff": f"{first_backoff.total_seconds():.3f}s",
        "maxBackoff": f"{longest_backoff.total_seconds():.3f}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})
