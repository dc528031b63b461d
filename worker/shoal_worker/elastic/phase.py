"""What this process's script is to its job: one phase at a time, changed by named transitions. Pure.

    REPLAYING --feed--> ARRIVING --arrive--> TRAINING --stop--> STOPPED
        |  ^                ^-----fall_behind----|  ^
        |  |------------set_aside----------------|  |--resume-- RETURNED <--go_back-- TRAINING, TORN
        |-------------------begin----------------^  |--mend---- TORN     <--tear----- TRAINING
    any --leave--> LEFT

How far the step in progress has come is the step's own (`step.py`); whether the group stands is the formation's. The training thread owns
it.
"""

from __future__ import annotations

import enum
from typing import Final


class Phase(enum.Enum):
    """What the script is to the job."""

    REPLAYING = "replaying"
    """It holds nothing that counts: a joiner that was not fed yet, or a spare. What it asks for is answered locally."""
    ARRIVING = "arriving"
    """It holds the job's state, and its script has not come to its peers' place: what it asks for is still answered locally."""
    TRAINING = "training"
    """It holds the job's state and takes its steps, or does operations between them."""
    TORN = "torn"
    """An update is under way, or raised half way through: the state must not be given to anyone."""
    RETURNED = "returned"
    """The state is that of an older checkpoint, and the script stands somewhere after the steps that it will redo, its peers' scripts
    somewhere else: until the next step begins each is answered locally."""
    STOPPED = "stopped"
    """No further step begins; operations between steps go on."""
    LEFT = "left"
    """It has said goodbye while the others go on: it acts for nobody."""


_HOLDING: Final = frozenset({Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED, Phase.STOPPED})


class ScriptPhase:
    """The phase of one process's script."""

    def __init__(self, *, live: bool) -> None:
        """`live`: what it has is the job's state from the start."""
        self.now = Phase.TRAINING if live else Phase.REPLAYING
        self.stopped: str | None = None
        """Why no further step begins; None: steps go on."""

    @property
    def holds_state(self) -> bool:
        """What it has is the job's state."""
        return self.now in _HOLDING

    @property
    def replaying(self) -> bool:
        """Its script has not come to its peers' place: what it asks for is answered locally."""
        return self.now in (Phase.REPLAYING, Phase.ARRIVING)

    def begin(self) -> None:
        """It was given a rank in a job that has not begun, or left its peers for a world of one."""
        self.now = Phase.TRAINING

    def feed(self) -> None:
        """At a border it took the job's state. Changes nothing for those that held it."""
        if self.now is Phase.REPLAYING:
            self.now = Phase.ARRIVING

    def arrive(self) -> None:
        """Its script has come to its first live batch, or there is no peer that was ahead of it."""
        self._move(Phase.ARRIVING, Phase.TRAINING)

    def fall_behind(self) -> None:
        """That batch was only looked at: the script is ahead of its loop still."""
        self._move(Phase.TRAINING, Phase.ARRIVING)

    def set_aside(self) -> None:
        """It is a spare: no replica could be made with it."""
        self.now = Phase.REPLAYING

    def tear(self) -> None:
        """The state begins to change."""
        self._move(Phase.TRAINING, Phase.TORN)

    def mend(self) -> None:
        """The state is whole: the change is done, or another state was taken in its place."""
        if self.now in (Phase.TORN, Phase.RETURNED):
            self.now = Phase.TRAINING

    def go_back(self) -> None:
        """A checkpoint's state was taken, which the script has left behind."""
        if self.now in (Phase.TRAINING, Phase.TORN):
            self.now = Phase.RETURNED

    def resume(self) -> None:
        """The next step begins."""
        if self.now is Phase.RETURNED:
            self.now = Phase.TRAINING

    def stop(self, reason: str) -> None:
        """No further step begins here."""
        self.stopped = self.stopped or reason
        self.now = Phase.STOPPED

    def leave(self, reason: str) -> None:
        """It says goodbye while the others go on."""
        self.stopped = self.stopped or reason
        self.now = Phase.LEFT

    def _move(self, source: Phase, target: Phase) -> None:
        assert self.now is source, f"from {self.now} to {target}: expected to be {source}"
        self.now = target
