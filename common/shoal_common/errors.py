"""Exceptions of Shoal, and the gRPC status of each class.

    ShoalError
    ├── ConfigurationError (ValueError)      INVALID_ARGUMENT     a setting that cannot work
    ├── InvalidRequestError (ValueError)     INVALID_ARGUMENT     a malformed request
    ├── UnknownResourceError (LookupError)   NOT_FOUND            no such job, member, partition
    ├── PreconditionError                    FAILED_PRECONDITION  not allowed in the current state
    │   └── StaleGenerationError             FAILED_PRECONDITION  the caller's generation has ended
    ├── LimitError                           RESOURCE_EXHAUSTED   larger than allowed
    ├── AuthenticationError                  UNAUTHENTICATED      no valid token or certificate
    ├── PermissionDeniedError                PERMISSION_DENIED    a valid token of the wrong role
    ├── UnavailableError                     UNAVAILABLE          temporarily impossible; try again
    ├── DeadlineError (TimeoutError)         DEADLINE_EXCEEDED    a wait exceeded its deadline
    ├── MembershipChanged                    ABORTED              a collective's group has ended
    ├── CorruptDataError                     DATA_LOSS            a file or transfer is damaged
    └── InternalError                        INTERNAL             a bug in Shoal

Every error has a `reason`: an UPPER_SNAKE name that is stable across releases and is sent as
google.rpc.ErrorInfo. An error from an overloaded service also has a `retry_after`, sent as
google.rpc.RetryInfo. The message is meant for users: it contains the value, the expectation and the
remedy. docs/troubleshooting.md has an entry for each reason. The conversions (to_status,
from_rpc_error) are in shoal_common.rpc.status. This module does not import gRPC, since every
program imports it first.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar


class ShoalError(Exception):
    """Base class of Shoal's exceptions. `reason` is the machine-readable cause; each class has a
    default reason."""

    code: ClassVar[str] = "UNKNOWN"
    """Name of the corresponding gRPC status."""
    default_reason: ClassVar[str] = "UNKNOWN"
    failed_at: float | None = None
    """Time of the failure (`time.time()`), set if the error is raised some time after it. Of
    several related failures, the earliest is the cause."""
    on_all_ranks: bool = False
    """True if all ranks of a job raise the error, so that a launcher need show it only once."""

    retry_after: timedelta | None
    """Minimum time to wait before calling an overloaded service again; None: not specified."""

    def __init__(
        self, message: str, *, reason: str | None = None, retry_after: timedelta | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.retry_after = retry_after


class ConfigurationError(ShoalError, ValueError):
    """A setting or argument is invalid. The message names it, its value and the remedy."""

    code = "INVALID_ARGUMENT"
    default_reason = "CONFIGURATION_INVALID"


class InvalidRequestError(ShoalError, ValueError):
    """A request is malformed: a field is missing, out of range, or contradicts another."""

    code = "INVALID_ARGUMENT"
    default_reason = "REQUEST_INVALID"


class UnknownResourceError(ShoalError, LookupError):
    """The job, member, server or partition does not exist at this service."""

    code = "NOT_FOUND"
    default_reason = "RESOURCE_UNKNOWN"


class PreconditionError(ShoalError):
    """The request is well formed but not allowed in the current state. Retrying it unchanged does
    not help."""

    code = "FAILED_PRECONDITION"
    default_reason = "PRECONDITION_FAILED"


class StaleGenerationError(PreconditionError):
    """The caller's generation has ended. The caller must rejoin or exit; retrying does not help."""

    default_reason = "STALE_GENERATION"


class LimitError(ShoalError):
    """A size or number exceeds the receiver's limit."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "LIMIT_EXCEEDED"


class AuthenticationError(ShoalError):
    """The bearer token is missing or unknown."""

    code = "UNAUTHENTICATED"
    default_reason = "TOKEN_INVALID"


class PermissionDeniedError(ShoalError):
    """The token is valid, but its role does not permit the request."""

    code = "PERMISSION_DENIED"
    default_reason = "ROLE_NOT_ALLOWED"


class UnavailableError(ShoalError):
    """The service is temporarily unavailable. The same call may be retried."""

    code = "UNAVAILABLE"
    default_reason = "UNAVAILABLE"


class DeadlineError(ShoalError, TimeoutError):
    """A wait exceeded its deadline. The message names what was awaited."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class MembershipChanged(ShoalError):
    """The members of a collective's process group have changed. A new group is needed."""

    code = "ABORTED"
    default_reason = "MEMBERSHIP_CHANGED"


class CorruptDataError(ShoalError):
    """A file or a transfer has a wrong checksum, is truncated, or was written by another program or
    a newer release."""

    code = "DATA_LOSS"
    default_reason = "DATA_CORRUPT"


class InternalError(ShoalError):
    """An invariant of Shoal has been violated. Please report this error as a bug."""

    code = "INTERNAL"
    default_reason = "INTERNAL"
