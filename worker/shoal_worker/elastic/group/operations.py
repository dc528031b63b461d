"""Joint operations of all ranks between steps: evaluate, decide on early stopping, save, confirm
the end of an epoch.

Operations are numbered from the last commit, the same on every rank. Their results are kept until
the next commit. If a fault hits an operation that some ranks had finished, those ranks send the
stored results to the others (see `Session`), and no rank repeats an operation unnecessarily.

Results are JSON values, since they are sent between processes. Everything runs on the training
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
"""Runs one operation over a channel; may be repeated on another channel when the membership has
changed meanwhile."""

_LEARNER = "spectator"


class Operations:
    """Operations since the last commit, as passed by this rank."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._position = 0
        self._awaited: list[Any] = []
        """Results after the next commit, that peers have already."""
        self.running: str | None = None
        """Kind of the operation that this rank is in with its peers."""

    @property
    def finished(self) -> int:
        """Number of results of this rank."""
        return len(self._results)

    @property
    def position(self) -> int:
        """Number of operations passed by the script since the last commit."""
        return self._position

    @contextlib.contextmanager
    def in_progress(self, kind: str) -> Iterator[None]:
        """Marks this rank as being in an operation with its peers."""
        self.running = kind
        try:
            yield
        finally:
            self.running = None

    def take_known(self) -> tuple[bool, Any]:
        """Returns (True, result) if the next operation's result is already known, and moves past
        it; otherwise (False, None)."""
        if self._position < len(self._results):
            self._position += 1
            return True, self._results[self._position - 1]
        return False, None

    def keep(self, result: Any) -> None:
        """Stores the result of the next operation."""
        self._results.append(result)
        self._position += 1

    def committed(self) -> None:
        """Restarts the numbering after a committed step."""
        self._results, self._awaited = self._awaited, []
        self._position = 0

    def encode(self) -> bytes:
        """Returns all results, for ranks that lack them."""
        return json.dumps(self._results).encode()

    def extend(self, encoded: bytes) -> None:
        """Takes results from a rank that is further, or equally far."""
        self._results = json.loads(encoded)

    def await_results(self, encoded: bytes) -> None:
        """Takes results of operations after a step that this rank is about to commit, from a rank
        that has committed it."""
        self._awaited = json.loads(encoded) if encoded else []

    def restart(self, encoded: bytes, *, passed: bool) -> None:
        """Takes another rank's results along with its state. `passed`: this rank's script is past
        these operations, too."""
        self._results = json.loads(encoded) if encoded else []
        self._position = len(self._results) if passed else 0


class GroupChannel:
    """Ranks of a group without the learners, which follow along and contribute nothing.

    Each message contains its operation, so that ranks whose scripts diverged get an error instead
    of each other's data.
    """

    def __init__(self, group: Group, kind: str, learners: tuple[int, ...]) -> None:
        self._group = group
        self._kind = kind
        self.members = [r for r in range(group.world_size) if r not in learners]
        """Their ranks in the group, ascending."""

    @property
    def rank(self) -> int:
        """Rank among the members."""
        return self.members.index(self._group.rank)

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all members and returns everybody's, in rank order."""
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
    """Follows the members' exchanges until they are all at the step boundary.

    Raises:
        MembershipChanged: the group has ended.
    """
    members = [r for r in range(group.world_size) if r not in learners]
    while True:
        group.rendezvous()
        answers = group.exchange(_LEARNER.encode() + b"\0")
        if all(answers[r].startswith(boundary.encode() + b"\0") for r in members):
            return
