"""What this process's script is to its job: one phase at a time, changed by named transitions.
Pure.

    REPLAYING --feed--> ARRIVING --arrive--> TRAINING --stop--> STOPPED
        |  ^                ^-----fall_behind----|  ^
        |  |------------set_aside----------------|  |--resume-- RETURNED <--go_back-- TRAINING
        |-------------------begin----------------^  |--mend---- TORN     <--tear----- TRAINING
    any --leave--> LEFT

Each transition lists the phases that it may start from, those in which it changes nothing included;
from any other it raises InternalError. These hold between any two of them:

1. A process whose phase is REPLAYING or LEFT gives its state to nobody, and answers for nobody in
   an operation. In all others it holds the job's state, whole but for TORN.
2. Only TRAINING begins to change the state. Who is in TORN stays there until an update of it
   returned or another state was taken in its place: a stop, a loop that is left and a checkpoint
   that could not be read do not make it whole.
3. `stopped` has a reason in STOPPED and LEFT, and may have one in TORN; in the others steps go on.
   A reason stays: a process that was told to stop never trains again, and one that has left never
   comes back.
4. A process that holds nothing of the job's is never STOPPED: it leaves instead, since its script
can say nothing of the job's state.

How far the step in progress has come is the step's own (`step.py`); whether the group stands is the
formation's. The training thread owns it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final

from shoal_common.errors import InternalError


class Phase(enum.Enum):
    """What the script is to the job."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and each step asks for a dozen

    REPLAYING = "replaying"
    """It holds nothing that counts: a joiner that was not fed yet, or a spare. What it asks for is
    answered locally."""
    ARRIVING = "arriving"
    """It holds the job's state, and its script has not come to its peers' place: what it asks for
    is still answered locally."""
    TRAINING = "training"
    """It holds the job's state and takes its steps, or does operations between them."""
    TORN = "torn"
    """An update is under way, or raised half way through: the state must not be given to anyone."""
    RETURNED = "returned"
    """The state is that of an older checkpoint, and the script stands somewhere after the steps
    that it will redo, its peers' scripts somewhere else: until the next step begins each is
    answered locally."""
    STOPPED = "stopped"
    """No further step begins; operations between steps go on."""
    LEFT = "left"
    """It has said goodbye while the others go on: it acts for nobody."""


_HOLDING: Final = frozenset(
    {Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED, Phase.STOPPED}
)


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
        """It was given a rank in a job that has not begun."""
        self._move("begin", {Phase.REPLAYING: Phase.TRAINING})

    def be_alone(self) -> None:
        """It has said goodbye at the end of its part, and goes on in a world of one: there is
        nobody to come to any more. What was torn, stopped or left stays so."""
        onward = (Phase.REPLAYING, Phase.ARRIVING, Phase.TRAINING, Phase.RETURNED)
        self._move(
            "be_alone",
            dict.fromkeys(onward, Phase.TRAINING),
            unchanged=(Phase.TORN, Phase.STOPPED, Phase.LEFT),
        )

    def feed(self) -> None:
        """At a border it took the job's state. Changes nothing for those that held it, who may be
        anywhere in their scripts: a joiner comes in where a run was stopped, or has gone back, as
        well."""
        self._move("feed", {Phase.REPLAYING: Phase.ARRIVING}, unchanged=_HOLDING)

    def arrive(self) -> None:
        """Its script has come to its first live batch, or there is no peer that was ahead of it."""
        self._move("arrive", {Phase.ARRIVING: Phase.TRAINING})

    def fall_behind(self) -> None:
        """That batch was only looked at: the script is ahead of its loop still. An error that
        leaves the loop half way through the batch's update changes nothing: the state is torn."""
        self._move("fall_behind", {Phase.TRAINING: Phase.ARRIVING}, unchanged=(Phase.TORN,))

    def set_aside(self) -> None:
        """It is a spare: no replica could be made with it. It will take its peers' state, whatever
        its own is like."""
        onward = (Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED)
        self._move(
            "set_aside", dict.fromkeys(onward, Phase.REPLAYING), unchanged=(Phase.REPLAYING,)
        )

    def tear(self) -> None:
        """The state begins to change."""
        self._move("tear", {Phase.TRAINING: Phase.TORN})

    def mend(self) -> None:
        """The change is done: the state is whole."""
        self._move("mend", {Phase.TORN: self._whole})

    def replace(self) -> None:
        """Another state, a peer's or a checkpoint's, was taken in the place of the one that it had.
        At any time: a script may read a checkpoint before its loop, after it, and when it has left.
        It is no joiner's arrival (`feed`)."""
        others = frozenset(Phase) - {Phase.TORN, Phase.RETURNED}
        self._move(
            "replace", {Phase.TORN: self._whole, Phase.RETURNED: Phase.TRAINING}, unchanged=others
        )

    def go_back(self) -> None:
        """The ranks have looked for a checkpoint to take in the place of a state that is lost.
        Where its state was taken (`replace`), the script has left it behind. A torn state was not
        replaced, so there was none. A script that arrives, or takes no further step, has no steps
        of its own to redo."""
        self._move(
            "go_back",
            {Phase.TRAINING: Phase.RETURNED},
            unchanged=(Phase.ARRIVING, Phase.TORN, Phase.RETURNED, Phase.STOPPED),
        )

    def resume(self) -> None:
        """The next step begins: in a joiner's script one that may only be looked at, and in a torn
        one's one that will not be applied."""
        self._move(
            "resume",
            {Phase.RETURNED: Phase.TRAINING},
            unchanged=(Phase.ARRIVING, Phase.TRAINING, Phase.TORN),
        )

    def stop(self, reason: str) -> None:
        """No further step begins here. A torn state stays torn."""
        onward = (Phase.TRAINING, Phase.RETURNED)
        self._move(
            "stop", dict.fromkeys(onward, Phase.STOPPED), unchanged=(Phase.STOPPED, Phase.TORN)
        )
        self.stopped = self.stopped or reason

    def leave(self, reason: str) -> None:
        """It says goodbye while the others go on."""
        self._move("leave", dict.fromkeys(Phase, Phase.LEFT))
        self.stopped = self.stopped or reason

    @property
    def _whole(self) -> Phase:
        return Phase.TRAINING if self.stopped is None else Phase.STOPPED

    def _move(
        self, name: str, onward: Mapping[Phase, Phase], *, unchanged: Collection[Phase] = ()
    ) -> None:
        """From each of `onward` to what stands beside it. From one of `unchanged` nowhere. Raises
        InternalError from any other."""
        if self.now in unchanged:
            return
        if self.now not in onward:
            allowed = sorted(phase.value for phase in {*onward, *unchanged})
            raise InternalError(
                f"{name}() in phase {self.now.value}: it may come in {', '.join(allowed)}",
                reason="PHASE_UNEXPECTED",
            )
        self.now = onward[self.now]
