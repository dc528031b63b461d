"""Which RPCs may be sent again when nobody knows whether the first one arrived, and the service
config that lets gRPC do so.

A test compares the table with the services' descriptors: every RPC is in it, once.
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
"""gRPC repeats these by itself on UNAVAILABLE."""

NOT_REPEATED: Final[Mapping[str, frozenset[str]]] = {
    # Sessions and events have a state that the caller must rebuild. A lost answer to LeaseBatches
    # would lease the batches twice.
    "shoal.v1.Coordinator": frozenset(
        {"JoinSession", "ServerSession", "LeaseBatches", "WatchEvents"}
    ),
    # Uploads are safe to repeat by their sequence numbers, but gRPC would have to keep the whole
    # stream in memory: the caller sends it again. Follow begins with what the primary holds by
    # then.
    "shoal.v1.ParameterServer": frozenset(
        {"Initialize", "Push", "RestoreRows", "Follow", "TakePartitions"}
    ),
}
"""Whoever calls these decides about a second attempt."""


def service_config(*, attempts: int, first_backoff: timedelta, longest_backoff: timedelta) -> str:
    """gRPC's JSON service config: idempotent methods are tried `attempts` times (2 to 5) in all, on
    UNAVAILABLE only."""
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
