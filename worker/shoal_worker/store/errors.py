"""Exceptions of a store: Shoal's errors that are also torch's, so that code written for
torch.distributed catches them.

This module does not import redis: a caller that distinguishes these errors needs no Redis client.
"""

from __future__ import annotations

from shoal_common.errors import (
    DeadlineError,
    InvalidRequestError,
    MembershipChanged,
    UnavailableError,
)
from torch.distributed import DistNetworkError, DistStoreError


class StoreTimeoutError(DeadlineError, DistStoreError):
    """Raised when a wait has reached its deadline. The message names the missing keys."""


class StoreAbortedError(MembershipChanged, DistStoreError):
    """The store was aborted: the group that was forming over the store has been superseded."""


class StoreValueError(InvalidRequestError, DistStoreError):
    """The value of a key is not supported by the call, such as `add` on a value that is not a
    number."""


class StoreUnavailableError(UnavailableError, DistNetworkError):
    """The store's server does not answer, and the call could not be repeated safely or failed again
    when repeated."""
