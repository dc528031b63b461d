"""Several works as one: a collective that is made of others, such as an all-gather of broadcasts.

Each part is followed, ended and accounted for by its group as if it had been issued alone; nothing of that is here. Threads: as the parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work


class AllOf(Work):
    """Complete when all `parts` are. `value` is what its future holds."""

    def __init__(self, parts: Sequence[Work], value: Any) -> None:
        super().__init__()
        self._parts = parts
        self._value = value
        self._failed = False
        """`wait` has raised; the parts after the one that failed may end later."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the result is in place, or raises what the first part to fail raises. `timeout` None or 0: however long it takes."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        self._failed = True
        for part in self._parts:
            if deadline is None:
                part.wait()
            else:
                part.wait(max(timedelta(milliseconds=1), timedelta(seconds=deadline - time.monotonic())))
        self._failed = False
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._failed or all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        """Whether `wait` has returned."""
        return all(part.is_success() for part in self._parts)

    def result(self) -> Any:
        """The output tensors, once `wait` has returned."""
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        return torch.futures.collect_all([part.get_future() for part in self._parts]).then(self._outcome)

    def _outcome(self, done: torch.futures.Future[Any]) -> Any:
        for part in done.value():
            part.value()  # raises if it failed
        return self._value
