"""What a store raises: Shoal's errors that are also torch's, so that code written against
torch.distributed catches them.

No import of redis here: a caller that tells these apart needs no Redis client.
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
    """A wait ran into its deadline. The message names the keys that did not come."""


class StoreAbortedError(MembershipChanged, DistStoreError):
    """The store was aborted: the group that was being formed over it is superseded."""


class StoreValueError(InvalidRequestError, DistStoreError):
    """A key holds something that the call cannot work on, such as `add` on a value that is no
    number."""


class StoreUnavailableError(UnavailableError, DistNetworkError):
    """The server of the store does not answer, and the call could not be repeated safely or was
    repeated in vain."""
