"""Controls jobs from another program: `Client`, `AsyncClient`, and the values that they return.
This package does not need torch, and its values are plain dataclasses instead of protobuf
messages."""

from shoal.client.aio import AsyncClient
from shoal.client.event import Event
from shoal.client.job import (
    Job,
    JobEnding,
    JobPhase,
    JobSummary,
    Machine,
    MachineCondition,
    Member,
    MemberPhase,
    PastRun,
    Server,
    ServerRole,
)
from shoal.client.result import Result
from shoal.client.streams import EventStream, LogStream
from shoal.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "EventStream",
    "Job",
    "JobEnding",
    "JobPhase",
    "JobSummary",
    "LogStream",
    "Machine",
    "MachineCondition",
    "Member",
    "MemberPhase",
    "PastRun",
    "Result",
    "Server",
    "ServerRole",
]
