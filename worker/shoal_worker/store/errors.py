"""Exceptions of a store. They derive from both Shoal's and torch's errors, so that code written for
torch.distributed catches them.

This module does not import redis, so code that distinguishes these errors does not need a Redis
client.
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
    """Raised because the store was aborted: the group that was being formed with it has been
    superseded by a newer one."""


class StoreValueError(InvalidRequestError, DistStoreError):
    """Raised if the value of a key does not support the call, such as `add` on a value that is not
    a number."""


class StoreUnavailableError(UnavailableError, DistNetworkError):
    """Raised if the store's server does not respond, and the call could not be retried safely or
    its retry failed too."""
