"""Joint operations of all ranks between steps: evaluate, decide on early stopping, save a
checkpoint, confirm the end of an epoch.

Operations are numbered from the last commit; every rank uses the same numbers. Their results are
kept until the next commit. If a fault interrupts an operation that some ranks have finished, these
ranks send the stored results to the others (see `Session`). No rank repeats an operation whose
result is known.

Results are JSON values, because they are sent between processes. All methods run on the training
thread.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.group.divergence import operations_apart
from shoal_worker.elastic.group.group import Group

Body = Callable[[Channel], Any]
"""Function that runs one operation over a channel. It is called again, with a new channel, if the
membership changes during the call.
"""

_LEARNER = "spectator"


class Operations:
    """Results of operations since the last commit, and the number of operations that the script has
    completed."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._position = 0
        self._awaited: list[Any] = []
        """Results of operations after the next commit, received from peers that have already
        finished these operations.
        """
        self.running: str | None = None
        """Kind of the operation that this rank is running with its peers; None outside of
        operations."""

    @property
    def finished(self) -> int:
        """Number of operations since the last commit whose results this rank has."""
        return len(self._results)

    @property
    def position(self) -> int:
        """Number of operations that the script has completed since the last commit."""
        return self._position

    @contextlib.contextmanager
    def in_progress(self, kind: str) -> Iterator[None]:
        """Context in which an operation of the given kind is running."""
        self.running = kind
        try:
            yield
        finally:
            self.running = None

    def take_known(self) -> tuple[bool, Any]:
        """Returns (True, result) if the result of the next operation is known, and counts that
        operation as completed; otherwise returns (False, None)."""
        if self._position < len(self._results):
            self._position += 1
            return True, self._results[self._position - 1]
        return False, None

    def keep(self, result: Any) -> None:
        """Stores the result of the operation that has just been completed."""
        self._results.append(result)
        self._position += 1

    def committed(self) -> None:
        """Restarts the numbering of operations, after a committed step."""
        self._results, self._awaited = self._awaited, []
        self._position = 0

    def encode(self) -> bytes:
        """Encodes all results, to be sent to ranks that lack them."""
        return json.dumps(self._results).encode()

    def extend(self, encoded: bytes) -> None:
        """Replaces the results with the results received from a rank that has finished at least as
        many operations.
        """
        self._results = json.loads(encoded)

    def await_results(self, encoded: bytes) -> None:
        """Stores results of operations that follow the step in progress. They were received from a
        rank that has already committed the step."""
        self._awaited = json.loads(encoded) if encoded else []

    def restart(self, encoded: bytes, *, passed: bool) -> None:
        """Replaces the results with the results received together with another rank's state.
        `passed`: True if this rank's script has completed these operations too.
        """
        self._results = json.loads(encoded) if encoded else []
        self._position = len(self._results) if passed else 0


class GroupChannel:
    """Channel between the members of a group, that is, all its ranks except learners. Learners take
    part in the exchanges, but do not contribute data.

    Each message contains the kind of its operation. Ranks whose scripts have diverged therefore
    receive an error instead of each other's data.
    """

    def __init__(self, group: Group, kind: str, learners: tuple[int, ...]) -> None:
        self._group = group
        self._kind = kind
        self.members = [r for r in range(group.world_size) if r not in learners]
        """Group ranks that are members of the channel, ascending."""

    @property
    def rank(self) -> int:
        """This rank's index among the members."""
        return self.members.index(self._group.rank)

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all members and returns every member's payload, in rank order."""
        self._group.rendezvous()
        answers = self._group.exchange(self._kind.encode() + b"\0" + payload)
        split = [answers[r].split(b"\0", 1) for r in self.members]
        kinds = {kind.decode() for kind, _ in split}
        if kinds != {self._kind}:
            operations_text = ", ".join(
                f"rank {r}: {answers[r].split(bytes(1), 1)[0].decode()}" for r in self.members
            )
            raise operations_apart(operations_text)
        return [body for _, body in split]


def follow_as_learner(group: Group, learners: tuple[int, ...], boundary: str) -> None:
    """Takes part in the members' exchanges as a learner, which contributes no data, until all
    members are at the step boundary. `boundary`: kind of the exchange that marks the step boundary.

    Raises:
        MembershipChanged: the group has ended.
    """
    members = [r for r in range(group.world_size) if r not in learners]
    while True:
        group.rendezvous()
        answers = group.exchange(_LEARNER.encode() + b"\0")
        if all(answers[r].startswith(boundary.encode() + b"\0") for r in members):
            return
