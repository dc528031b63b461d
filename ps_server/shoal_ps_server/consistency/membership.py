"""The fence and the clocks of a running server, and the waits that they require. fence.py and
clocks.py make the decisions. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Final

from shoal_common.errors import DeadlineError, UnavailableError

from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.consistency.fence import Change, Fence, Verdict

ADMISSION_WAIT: Final = timedelta(seconds=5)
"""Maximum wait, for a caller in an unknown generation, until the coordinator announces the
generation. If the coordinator is running, this takes milliseconds."""
PUSH_WAIT: Final = timedelta(seconds=5)
"""Maximum wait of a bsp push until other members have read the values that it would change. After
this time, the worker checks whether it has to leave, and sends the push again."""

_NONE: Final[Mapping[str, str]] = {}
_NAMED: Final = 5
"""Maximum number of awaited members that an error lists."""


class Membership:
    """Admits members and makes them wait for each other, as the fence and the clocks require."""

    def __init__(
        self,
        *,
        fence: Fence,
        clocks: Clocks,
        admission_wait: timedelta = ADMISSION_WAIT,
        push_wait: timedelta = PUSH_WAIT,
        first_heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`first_heard`: called before a member's first report, which determines how its count is
        converted to a clock."""
        self.fence = fence
        self.clocks = clocks
        self.consistency = Consistency()
        self._admission_wait = admission_wait
        self._push_wait = push_wait
        self._first_heard = first_heard
        self._stopping = False
        self._news = asyncio.Event()
        """Event that is set, and replaced by a new one, whenever state that callers may be waiting
        for changes."""

    def learn(
        self, generation: int, members: Iterable[str], key_digests: Mapping[str, str] = _NONE
    ) -> Change:
        """Adopts the members of a generation and the digests of their keys, as announced by the
        coordinator."""
        change = self.fence.learn(generation, members, key_digests)
        self.clocks.follow(self.fence.members)
        self._announce()
        return change

    async def know(self, generation: int) -> None:
        """Waits until the coordinator has announced `generation` or a newer generation. Raises
        UnavailableError / MEMBERSHIP_UNKNOWN after `admission_wait`."""
        if not await self._until(lambda: self.fence.generation >= generation, self._admission_wait):
            raise UnavailableError(
                f"generation {generation} is newer than {max(self.fence.generation, 0)}, the "
                "newest known to this server, and the coordinator did not announce it within "
                f"{self._admission_wait.total_seconds():g} s; try again",
                reason="MEMBERSHIP_UNKNOWN",
            )

    def take_over(self, fence: Fence, clocks: Clocks | None) -> None:
        """Adds the members that another server has recorded as evicted (`fence`), and continues
        with that server's `clocks`. If `clocks` is None, keeps this server's own clocks."""
        self.fence.remember(fence)
        if clocks is not None:
            self.clocks = clocks
            self.clocks.follow(self.fence.members)
        self._announce()

    def wake(self) -> None:
        """Makes every waiting call check its condition again, after a change of state."""
        self._announce()

    def check(self, member: str, generation: int) -> None:
        """Raises StaleGenerationError if a caller that was admitted earlier is no longer
        admitted."""
        self.fence.check(member, generation)

    def check_key(self, member: str, key: str) -> None:
        """Raises PermissionDeniedError if `key` is not the key of this member of the newest
        generation."""
        self.fence.check_key(member, key)

    async def admit(self, member: str, generation: int, *, key: str = "") -> None:
        """Waits until the caller may act as `member`. `key`: key presented by the caller.

        Raises PermissionDeniedError like `check_key`, StaleGenerationError, or UnavailableError /
        MEMBERSHIP_UNKNOWN if the coordinator has not announced the caller's generation within
        `admission_wait`.
        """
        if self.fence.check(member, generation) is not Verdict.ADMITTED:
            await self._until_admitted(member, generation)
        self.check_key(member, key)

    async def _until_admitted(self, member: str, generation: int) -> None:
        if not await self._until(
            lambda: self.fence.check(member, generation) is Verdict.ADMITTED, self._admission_wait
        ):
            raise UnavailableError(
                f"member {member!r} is in generation {generation}, but the newest generation "
                f"known to this server is {max(self.fence.generation, 0)}, and the "
                "coordinator announced no newer one within "
                f"{self._admission_wait.total_seconds():g} s; try again",
                reason="MEMBERSHIP_UNKNOWN",
            )

    def finished(self, member: str, clock: int, *, place: int = 0) -> None:
        """Records that a member has finished iteration `clock`, in its own numbering. Ignores a
        member that has just been evicted. `place`: as in `Clocks.report`."""
        if member in self.fence.members:
            self._hear(member)
            self.clocks.report(member, clock, place=place)
            self._clocks_changed()

    def has_read(self, member: str, clock: int) -> None:
        """Records that a member has read the values at the end of iteration `clock`, in its own
        numbering. Ignores a member that has just been evicted."""
        if member in self.fence.members:
            self._hear(member)
            self.clocks.has_read(member, clock)
            self._clocks_changed()

    async def proceed(
        self,
        member: str,
        generation: int,
        *,
        wait: timedelta,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until the member may begin its next iteration.

        Raises DeadlineError (SSP_WAIT_TIMEOUT, BSP_WAIT_TIMEOUT) after `wait`, and
        StaleGenerationError if the member is evicted during the wait. `check`: called during the
        wait; if it raises an error, the wait ends with this error.
        """

        def may_proceed() -> bool:
            self.fence.check(member, generation)
            check()
            return self.clocks.may_proceed(member, self.consistency)

        if may_proceed() or await self._until(may_proceed, wait):
            return
        awaited = self.clocks.behind(member, self.consistency.bound)
        raise self._too_long(
            f"member {member!r} is {self.clocks.lead(member)} clocks ahead of the slowest "
            f"({self.clocks.slowest}), but {self._mode} allows only {self.consistency.bound}",
            awaited,
            wait,
        )

    async def let_in(
        self, member: str, generation: int, clock: int, *, check: Callable[[], None] = lambda: None
    ) -> None:
        """Waits until a push may be admitted. Under bsp, all other members must have read the
        values that the push would change; otherwise returns immediately. `clock`: iteration that
        the push completes, in the member's numbering.

        Raises DeadlineError / BSP_WAIT_TIMEOUT, and StaleGenerationError if the member is evicted
        during the wait. `check`: called during the wait; if it raises an error, the wait ends with
        this error.
        """
        self.check(member, generation)
        if self.consistency.mode is not ConsistencyMode.BSP:
            return
        self._hear(member)
        iteration = self.clocks.arrive(member, clock)
        self._clocks_changed()

        def has_been_read() -> bool:
            self.fence.check(member, generation)
            check()
            return not self.clocks.awaited(iteration)

        if not (has_been_read() or await self._until(has_been_read, self._push_wait)):
            raise self._too_long(
                f"this push of member {member!r} is for iteration {iteration}, but others have "
                "not yet read the values of the previous one",
                self.clocks.awaited(iteration),
                self._push_wait,
            )
        self.clocks.open(iteration)

    def stop(self) -> None:
        """Aborts all waits of the server. The waiting calls fail with UnavailableError /
        SERVER_STOPPING; callers may retry later or on a different server."""
        self._stopping = True
        self._announce()

    async def _until(self, condition: Callable[[], bool], wait: timedelta) -> bool:
        try:
            async with asyncio.timeout(wait.total_seconds()):
                while not condition():
                    if self._stopping:
                        raise UnavailableError(
                            "this server is stopping; try again", reason="SERVER_STOPPING"
                        )
                    await self._news.wait()
                return True
        except TimeoutError:
            return False

    @property
    def _mode(self) -> str:
        return self.consistency.mode.value

    def _too_long(self, what: str, awaited: list[str], waited: timedelta) -> DeadlineError:
        named = ", ".join(map(repr, awaited[:_NAMED])) + f" and {len(awaited) - _NAMED} more" * (
            len(awaited) > _NAMED
        )
        return DeadlineError(
            f"{what}; waited {waited.total_seconds():g} s for "
            f"{named or 'members that have since caught up'}; try again",
            reason=f"{self._mode.upper()}_WAIT_TIMEOUT",
        )

    def _hear(self, member: str) -> None:
        if not self.clocks.has_reported(member):
            self._first_heard()

    def _clocks_changed(self) -> None:
        if self.consistency.mode is not ConsistencyMode.ASP:
            self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
