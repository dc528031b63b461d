"""The client's public interface: both clients have the same calls, and their results are plain
values."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import pytest
from shoal import client
from shoal.client import AsyncClient, Client
from shoal_protos.v1 import coordinator_pb2 as pb

_HOW = {"submit_command"}
"""Methods that only the blocking client has, for the command line."""
_VALUES = [
    value for name in client.__all__ if dataclasses.is_dataclass(value := getattr(client, name))
]


def calls(kind: type[Any]) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def test_both_clients_have_the_same_calls_with_the_same_arguments() -> None:
    blocking, asynchronous = calls(Client), calls(AsyncClient)
    assert blocking.keys() - _HOW == asynchronous.keys()
    for name, signature in asynchronous.items():
        assert signature.parameters == blocking[name].parameters, name


@pytest.mark.parametrize("kind", _VALUES, ids=lambda kind: kind.__name__)
def test_client_results_are_frozen_and_free_of_protobuf(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen
    for name, hint in typing.get_type_hints(kind).items():
        assert "_pb2" not in str(hint), name


@pytest.mark.parametrize(
    ("enum", "kind", "prefix"),
    [
        (pb.JobPhase, client.JobPhase, "JOB_PHASE_"),
        (pb.JobEnding, client.JobEnding, "JOB_ENDING_"),
        (pb.MemberPhase, client.MemberPhase, "MEMBER_PHASE_"),
        (pb.ServerRole, client.ServerRole, "SERVER_ROLE_"),
    ],
)
def test_every_value_of_the_protocols_enums_has_a_name(enum: Any, kind: Any, prefix: str) -> None:
    assert {name.removeprefix(prefix) for name in enum.keys()} - {"UNSPECIFIED"} == {  # noqa: SIM118
        each.name for each in kind
    } - {"UNKNOWN"}
