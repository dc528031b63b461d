"""Errors over gRPC: every class maps to a status and back."""

from __future__ import annotations

import inspect
from datetime import timedelta
from types import SimpleNamespace

import grpc
import pytest
import torch
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from shoal_common import errors
from shoal_common.errors import (
    InternalError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_common.rpc.status import (
    DOMAIN,
    as_shoal_error,
    error_message,
    from_error_message,
    from_rpc_error,
    to_status,
)

ALL_ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ShoalError)
]


class FakeRpcError(grpc.RpcError):
    """The client's view of a status: code, details and trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata=()) -> None:
        self._seen = SimpleNamespace(code=code, details=details, metadata=metadata)

    def code(self):
        return self._seen.code

    def details(self):
        return self._seen.details

    def trailing_metadata(self):
        return self._seen.metadata


def over_the_wire(error: ShoalError) -> ShoalError:
    status = to_status(error)
    return from_rpc_error(FakeRpcError(status.code, status.details, status.trailing_metadata))


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reason", [None, "SOMETHING_ELSE"])
def test_every_error_keeps_class_code_reason_and_message(kind, reason):
    sent = kind("rank 3: expected 8 bytes", reason=reason)
    got = over_the_wire(sent)
    assert type(got) is kind
    assert got.reason == (reason or kind.default_reason)
    assert str(got) == "rank 3: expected 8 bytes"
    assert to_status(sent).code.name == kind.code


def test_the_table_in_the_docstring_names_every_error_class():
    for kind in ALL_ERRORS:
        assert kind.__name__ in errors.__doc__


def test_error_class_defined_elsewhere_becomes_its_nearest_known_base():
    class ShardGone(StaleGenerationError):
        default_reason = "SHARD_GONE"

    got = over_the_wire(ShardGone("gone"))
    assert type(got) is StaleGenerationError
    assert got.reason == "SHARD_GONE"


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_message_keeps_class_reason_and_text_without_grpc(kind):
    got = from_error_message(error_message(kind("what happened", reason="SOME_REASON")))
    assert (type(got), got.reason, str(got)) == (kind, "SOME_REASON", "what happened")


def test_bytes_that_are_not_an_error_message_are_corrupt():
    assert type(from_error_message(b"\xff\xff")) is errors.CorruptDataError


def test_error_info_is_readable_in_other_languages():
    (_, value), *rest = to_status(StaleGenerationError("old")).trailing_metadata
    assert not rest
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    assert (info.domain, info.reason) == (DOMAIN, "STALE_GENERATION")


@pytest.mark.parametrize(
    "message", ["x" * 100_000, "\N{SNOWMAN}" * 50_000, "lone surrogate \ud800"]
)
def test_messages_too_long_or_not_encodable_for_trailers_are_cut_and_not_lost(message):
    status = to_status(PreconditionError(message))
    assert status.details[:4] == message[:4]
    assert len(status.details.encode()) <= 1200
    assert len(status.trailing_metadata[0][1]) < 2000


def test_grpcs_own_status_gets_the_class_of_its_code_and_names_the_request():
    got = from_rpc_error(
        FakeRpcError(grpc.StatusCode.UNAVAILABLE, "failed to connect"),
        call="GetJob at 10.0.0.1:7000",
    )
    assert type(got) is UnavailableError
    assert got.reason == "UNAVAILABLE"
    assert str(got) == "GetJob at 10.0.0.1:7000: failed to connect"


def test_a_call_that_the_server_cancelled_may_be_tried_again():
    assert (
        type(from_rpc_error(FakeRpcError(grpc.StatusCode.CANCELLED, "CANCELLED", None)))
        is UnavailableError
    )


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_code_becomes_some_shoal_error_even_without_details(code):
    got = from_rpc_error(FakeRpcError(code, None, None))
    assert isinstance(got, ShoalError)
    assert str(got) == code.name
    assert got.code == code.name or type(got) is ShoalError or code is grpc.StatusCode.CANCELLED


def test_details_that_do_not_parse_are_ignored():
    error = FakeRpcError(
        grpc.StatusCode.NOT_FOUND,
        "no such job",
        (("grpc-status-details-bin", b"\xff\xff\xff"), ("other", "1")),
    )
    assert type(from_rpc_error(error)) is errors.UnknownResourceError


def test_an_error_info_of_another_domain_is_ignored():
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUOTA", domain="proxy.example"))
    value = status_pb2.Status(code=8, message="m", details=[detail]).SerializeToString()
    got = from_rpc_error(
        FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "m", (("grpc-status-details-bin", value),))
    )
    assert got.reason == "LIMIT_EXCEEDED"


@pytest.mark.parametrize(
    ("code", "reason", "named", "expected"),
    [
        # A server in another language knows the reasons but not Shoal's classes.
        (grpc.StatusCode.FAILED_PRECONDITION, "STALE_GENERATION", "", StaleGenerationError),
        (grpc.StatusCode.INVALID_ARGUMENT, "OPTIMIZER_INVALID", "", InvalidRequestError),
        # A class that contradicts the code is ignored.
        (grpc.StatusCode.NOT_FOUND, "X", "StaleGenerationError", errors.UnknownResourceError),
        (grpc.StatusCode.NOT_FOUND, "X", "SystemExit", errors.UnknownResourceError),
    ],
)
def test_reason_then_code_decide_without_a_known_class(code, reason, named, expected):
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=reason, domain=DOMAIN, metadata={"class": named} if named else {}
        )
    )
    value = status_pb2.Status(code=code.value[0], message="m", details=[detail]).SerializeToString()
    got = from_rpc_error(FakeRpcError(code, "m", (("grpc-status-details-bin", value),)))
    assert type(got) is expected
    assert got.reason == reason


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (None, None),
        (timedelta(milliseconds=1500), timedelta(milliseconds=1500)),
        (timedelta(seconds=-5), timedelta(0)),
        # another side cannot make a caller wait forever
        (timedelta(days=1), timedelta(minutes=1)),
    ],
)
def test_retry_hint_is_sent_with_the_error(sent, received):
    got = over_the_wire(UnavailableError("busy", reason="BUSY", retry_after=sent))
    assert (type(got), got.reason, got.retry_after) == (UnavailableError, "BUSY", received)


def test_proxy_may_send_a_retry_hint():
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 4}))
    status = status_pb2.Status(code=14, message="overloaded", details=[detail])
    got = from_rpc_error(
        FakeRpcError(
            grpc.StatusCode.UNAVAILABLE,
            "overloaded",
            (("grpc-status-details-bin", status.SerializeToString()),),
        )
    )
    assert (type(got), got.retry_after) == (UnavailableError, timedelta(seconds=4))


def test_retry_hint_longer_than_any_wait_is_capped() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = 2**62
    detail = any_pb2.Any()
    detail.Pack(retry)
    encoded = status_pb2.Status(
        code=grpc.StatusCode.UNAVAILABLE.value[0], message="busy", details=[detail]
    ).SerializeToString()
    assert from_error_message(encoded).retry_after == timedelta(minutes=1)


def allocated_by_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def allocated_by_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("allocate", [allocated_by_torch, allocated_by_python])
def test_handler_out_of_memory_reports_the_limit_and_not_a_bug(allocate) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    reported = as_shoal_error(caught.value, "PushGradients")
    assert (type(reported), reported.reason) == (LimitError, "MEMORY_EXHAUSTED")
    assert "give it more" in str(reported)


def test_other_runtime_errors_of_a_handler_stay_bugs() -> None:
    assert isinstance(as_shoal_error(RuntimeError("shapes differ"), "PushGradients"), InternalError)
