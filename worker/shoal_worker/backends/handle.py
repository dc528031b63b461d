"""A collective that was issued: what there is to wait for.

It does not retry: a collective that fails on the wire ends its group. Threads: a handle belongs to the thread that issued it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from shoal_common.errors import PreconditionError


class Handle:
    """The completion of one collective."""

    def __init__(self, work: dist.Work, *, finish: Callable[[], None] | None, failed: Callable[[RuntimeError], None]) -> None:
        """`finish` runs once `work` has completed. `failed` sees its failure first, and may raise another error instead."""
        self._work: dist.Work | None = work
        self._failure: str | None = None
        self._finish = finish
        self._failed = failed

    def wait(self) -> None:
        """Returns when the result is in place; may be called again. Raises MembershipChanged when the group failed."""
        if self._failure is not None:
            raise PreconditionError(f"this collective has failed before: {self._failure}")
        # Let go of the work in any case: it would keep the sockets of its group open.
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                # Only the text is kept: the error itself refers, by its traceback, to this handle and to the group.
                self._failure = str(error)
                del work
                self._failed(error)
                raise
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._work is None or bool(self._work.is_completed())
