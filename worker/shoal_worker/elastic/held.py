"""The run's state as this process holds it: model and optimizer, registered objects, loaders' cursors, and the name of it all.

What is captured here is what joiners get, what checkpoints keep and what a rank that fell behind takes over. It moves no bytes and knows no
peers. All of it is touched by the training thread alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.elastic.contract import StepSource
from shoal_worker.elastic.operations import Operations
from shoal_worker.elastic.place import Place
from shoal_worker.elastic.reconcile import Standing, StateName
from shoal_worker.elastic.registered import RegisteredState
from shoal_worker.elastic.replica import Replica


class HeldState:
    """What this process would go on from."""

    def __init__(self, *, live: bool) -> None:
        self.live = live
        """It is the job's state. False in a joiner until it was fed."""
        self.name: StateName | None = None
        """None: it has no name yet, so it counts for nothing."""
        self.torn = False
        """An update raised half way through: it must not be given to anyone."""
        self.registered = RegisteredState()
        self.operations = Operations()
        self._replica: Replica | None = None
        self._sources: weakref.WeakValueDictionary[str, StepSource] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Any] = {}
        """Cursors of loaders that the script has not made yet."""
        self._numbers: dict[str, int] = {}
        self._loops: dict[str, Any] = {}
        """For each loader whose `epochs()` was entered: its epoch, and from where the others counted when that opened."""
        self._loops_to_enter: dict[str, Any] = {}

    # --------------------------------------------------------------------------------------------------------------- parts

    @property
    def replica(self) -> Replica:
        """Model and optimizer. Raises PreconditionError before `as_distributed`."""
        if self._replica is None:
            raise PreconditionError("call shoal.as_distributed(model, optimizer, ...) before the training loop")
        return self._replica

    @property
    def has_replica(self) -> bool:
        """`as_distributed` was called."""
        return self._replica is not None

    def set_replica(self, replica: Replica) -> None:
        """Takes model and optimizer. Raises PreconditionError when there are others already."""
        if self._replica is not None:
            raise PreconditionError(
                "as_distributed was called a second time; a process trains one model and optimizer: put several modules into one nn.Module"
            )
        self._replica = replica

    @property
    def sources(self) -> list[StepSource]:
        """The training loaders that the script still holds."""
        return list(self._sources.values())

    def add_source(self, source: StepSource) -> None:
        """See `StepClock.register_source`."""
        if self._sources.get(source.name, source) is not source:
            raise ConfigurationError(
                f"two training loaders have the name {source.name!r}; give each a name of its own: ElasticDataLoader(..., name=...)"
            )
        self._sources[source.name] = source
        self._numbers.setdefault(source.name, len(self._numbers) + 1)
        if source.name in self._waiting:
            source.load_state_dict(self._waiting.pop(source.name))

    # --------------------------------------------------------------------------------------------------------------- place

    def place(self, source: StepSource | None) -> Place:
        """Where the script stands when it takes a step of `source`."""
        if source is None:
            return Place("", 0, 0, 0)
        return Place(source.name, self._numbers[source.name], source.epoch, source.step)

    def enter_epochs(self, source: StepSource) -> None:
        """The script is at the head of a loop over epochs, and `source` stands where the run does. If that is from a state that was loaded,
        other loaders count their iterations from where that loop's epoch had them: the ones before were in epochs that are passed over."""
        loop = self._loops_to_enter.pop(source.name, None)
        if loop is None:
            return
        for other in self.sources:
            if other is not source:
                other.count_from(loop["others"].get(other.name) if loop["epoch"] == source.epoch else None)

    def epoch_opens(self, source: StepSource) -> None:
        """A loop over epochs of `source` gives out its next one."""
        others = {other.name: other.next_epoch for other in self.sources if other is not source}
        self._loops[source.name] = {"epoch": source.epoch, "others": others}

    def arrived(self) -> None:
        """A joiner's script has come to its peers' place: what it passed over on the way is counted as theirs."""
        for source in self.sources:
            source.count_from(None)

    # --------------------------------------------------------------------------------------------------------------- state

    @property
    def steps(self) -> int:
        """Committed steps of the run."""
        return self.name.step if self.name is not None else 0

    def capture(self, replica: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The committed state. Shares memory with its parts. `replica`: what stands for model and optimizer; None: what this rank has."""
        return {
            "replica": replica if replica is not None else self.replica.capture(),
            "registered": self.registered.capture(),
            "sources": {source.name: source.state_dict() for source in self.sources} | self._waiting,
            "loops": self._loops,
            "steps": self.steps,
        }

    def restore(self, captured: Mapping[str, Any], *, skip_advances: bool) -> None:
        """Takes over a captured state, but for its name. `skip_advances`: see `RegisteredState.restore`."""
        self.replica.restore(captured["replica"])
        self.registered.restore(captured["registered"], skip_advances=skip_advances)
        waiting = dict(captured["sources"])
        for source in self.sources:
            if source.name in waiting:
                source.load_state_dict(waiting.pop(source.name))
        self._waiting = waiting
        self._loops, self._loops_to_enter = dict(captured["loops"]), dict(captured["loops"])

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """While open, parameters change: whoever raises in here leaves the state torn."""
        self.torn = True
        yield
        self.torn = False

    def standing(self) -> Standing:
        """What this rank says of itself when a generation forms."""
        return Standing(
            state=self.name if self.live else None,
            attached=self.has_replica,
            spectator=not self.live,
            poisoned=self.torn,
            operations=self.operations.finished,
        )
