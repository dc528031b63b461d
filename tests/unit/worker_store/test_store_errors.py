"""Store errors are both Shoal errors and torch errors."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from shoal_common.errors import (
    DeadlineError,
    InvalidRequestError,
    MembershipChanged,
    ShoalError,
    UnavailableError,
)
from shoal_worker.store.errors import (
    StoreAbortedError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreValueError,
)


@pytest.mark.parametrize(
    ("raised", "ours", "theirs"),
    [
        (StoreTimeoutError, DeadlineError, dist.DistStoreError),
        (StoreAbortedError, MembershipChanged, dist.DistStoreError),
        (StoreValueError, InvalidRequestError, dist.DistStoreError),
        (StoreUnavailableError, UnavailableError, dist.DistNetworkError),
    ],
)
def test_errors_can_be_caught_as_torchs_and_as_shoals(
    raised: type[ShoalError], ours: type[ShoalError], theirs: type[Exception]
) -> None:
    error = raised("what happened")
    assert isinstance(error, ours)
    assert isinstance(error, theirs)
    assert isinstance(error, RuntimeError)
    assert str(error) == "what happened"
    assert error.reason == ours.default_reason
