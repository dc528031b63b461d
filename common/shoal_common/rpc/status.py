"""Converts errors for gRPC, without losing class, reason and retry delay: ShoalError -> rich status
(google.rpc.Status with ErrorInfo and RetryInfo) -> ShoalError.

ErrorInfo.reason is the error's reason, ErrorInfo.domain is "shoal", and ErrorInfo.metadata["class"]
is its class in shoal_common.errors. Clients in other languages need only the code and the reason.
Statuses that do not come from Shoal (no connection, a deadline, a proxy's response) have no
ErrorInfo; their class is derived from the code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shoal_common import errors
from shoal_common.errors import ShoalError

logger = logging.getLogger(__name__)

DOMAIN: Final = "shoal"
_CLASS_KEY: Final = "class"
_DETAILS_KEY: Final = "grpc-status-details-bin"

# gRPC refuses trailers above 8 KiB, and the message is sent twice: percent-encoded (with up to
# three bytes per byte) and within the details.
_LONGEST_MESSAGE_BYTES: Final = 1200
_LONGEST_REASON: Final = 63
_LONGEST_RETRY: Final = timedelta(minutes=1)
"""Maximum retry delay that is accepted from a peer."""

_CLASSES: Final[Mapping[str, type[ShoalError]]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ShoalError)
}
_BY_CODE: Final[Mapping[grpc.StatusCode, type[ShoalError]]] = {
    # Two classes have this code. A status without a class is from a server that considers the
    # request malformed.
    **{
        grpc.StatusCode[kind.code]: kind
        for kind in _CLASSES.values()
        if ShoalError in kind.__bases__
    },
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    # A caller that cancels a call does not read its status. If the status is read, the server has
    # exited without waiting for the call.
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
}


def to_status(error: ShoalError) -> Any:
    """Returns the grpc.Status (code, details, trailing_metadata) for an error. Messages of more
    than 1200 bytes are truncated."""
    return rpc_status.to_status(_status(error))


def error_message(error: ShoalError) -> bytes:
    """Encodes an error as a google.rpc.Status, to be sent without gRPC."""
    return bytes(_status(error).SerializeToString())


def from_error_message(data: bytes) -> ShoalError:
    """Returns the ShoalError that an encoded google.rpc.Status describes, or a CorruptDataError if
    the encoding is invalid."""
    try:
        status = status_pb2.Status.FromString(data)
        info, retry_after = _details_in(status)
    except DecodeError as error:
        return errors.CorruptDataError(
            f"cannot parse {len(data)} bytes as google.rpc.Status: {error}",
            reason="MESSAGE_MALFORMED",
        )
    code = next(
        (code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN
    )
    if info is None:
        return _BY_CODE.get(code, ShoalError)(status.message, retry_after=retry_after)
    return _class_of(code, info)(status.message, reason=info.reason, retry_after=retry_after)


def as_shoal_error(error: Exception, method: str) -> ShoalError:
    """Converts an error raised in `method` to a ShoalError for the caller.

    Malformed messages and a lack of memory become the corresponding ShoalErrors. Any other
    exception that is not a ShoalError is a bug. It is logged with its traceback; the caller
    receives only the method and the exception class.
    """
    if isinstance(error, ShoalError):
        if isinstance(error, errors.InternalError):
            logger.error("internal error", exc_info=error, extra={"method": method})
        return error
    if isinstance(error, DecodeError):
        message = (
            f"{method}: cannot parse a message: {error}; check that client and server use the same "
            "protos"
        )
        return errors.InvalidRequestError(message, reason="MESSAGE_MALFORMED")
    if _is_out_of_memory(error):
        logger.error("ran out of memory", extra={"method": method, "error": error})
        message = (
            f"{method}: the server ran out of memory ({error}); give it more memory, or the job "
            "more servers"
        )
        return errors.LimitError(message, reason="MEMORY_EXHAUSTED")
    logger.error("a request handler failed", exc_info=error, extra={"method": method})
    return errors.InternalError(
        f"{method} failed with {type(error).__name__}; see the server's log"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error means that memory could not be allocated: a MemoryError, or a
    RuntimeError from torch, which can be recognized only by its text."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _status(error: ShoalError) -> status_pb2.Status:
    kind = next(kind for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason[:_LONGEST_REASON], domain=DOMAIN, metadata={_CLASS_KEY: kind.__name__}
    )
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_after)
        details.append(any_pb2.Any())
        details[1].Pack(retry)
    return status_pb2.Status(
        code=grpc.StatusCode[error.code].value[0], message=_cut(str(error)), details=details
    )


async def abort(context: grpc.aio.ServicerContext, error: ShoalError) -> NoReturn:
    """Aborts a grpc.aio call with the status of an error. Handlers of an RpcServer need not call
    this; they raise the error."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("unreachable: abort raises")


def from_rpc_error(rpc_error: grpc.RpcError, *, call: str = "") -> ShoalError:
    """Returns the ShoalError for a failed call, to be raised `from rpc_error`.

    `call`: the call and its target, e.g. "GetJob at 127.0.0.1:7000". It is prepended to messages
    that gRPC itself has generated, which do not name the call.
    """
    code = rpc_error.code()
    message = rpc_error.details() or code.name
    info, retry_after = _details(rpc_error)
    if info is None:
        kind = _BY_CODE.get(code, ShoalError)
        reason = kind.default_reason if kind is not ShoalError else code.name
        return kind(
            f"{call}: {message}" if call else message, reason=reason, retry_after=retry_after
        )
    return _class_of(code, info)(message, reason=info.reason, retry_after=retry_after)


def is_unreachable(rpc_error: grpc.RpcError) -> bool:
    """Returns whether gRPC itself, rather than the called server, raised UNAVAILABLE."""
    return rpc_error.code() is grpc.StatusCode.UNAVAILABLE and _details(rpc_error)[0] is None


def _class_of(code: grpc.StatusCode, info: error_details_pb2.ErrorInfo) -> type[ShoalError]:
    named = _CLASSES.get(info.metadata.get(_CLASS_KEY, ""))
    return named if named is not None and named.code == code.name else _by_reason(code, info.reason)


def _by_reason(code: grpc.StatusCode, reason: str) -> type[ShoalError]:
    """Returns the error class for a status that contains a reason but does not name a class."""
    for kind in _CLASSES.values():
        if kind.code == code.name and kind.default_reason == reason:
            return kind
    return _BY_CODE.get(code, ShoalError)


def _details(
    rpc_error: grpc.RpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, timedelta | None]:
    """Returns the ErrorInfo of an error, which only Shoal's code sets, and its retry delay, which a
    proxy may set too."""
    encoded = next(
        (value for key, value in rpc_error.trailing_metadata() or () if key == _DETAILS_KEY), b""
    )
    try:
        return _details_in(status_pb2.Status.FromString(encoded))
    except DecodeError:
        return None, None


def _details_in(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo | None, timedelta | None]:
    found: error_details_pb2.ErrorInfo | None = None
    retry_after: timedelta | None = None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            found = found or info
        elif detail.Unpack(retry):
            retry_after = timedelta(
                seconds=min(max(retry.retry_delay.seconds, 0), _LONGEST_RETRY.total_seconds())
            )
            if retry_after < _LONGEST_RETRY:
                retry_after += timedelta(microseconds=max(retry.retry_delay.nanos, 0) // 1000)
    return found, retry_after


def _cut(message: str) -> str:
    encoded = message.encode(errors="replace")
    if len(encoded) <= _LONGEST_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: _LONGEST_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
