"""Phase of this process's script in its job: one phase at a time, changed by named transitions.
Pure.

    REPLAYING --sync--> ARRIVING --arrive--> TRAINING --stop--> STOPPED
        |  ^                ^-----fall_behind----|  ^
        |  |------------set_aside----------------|  |--resume-- RETURNED <--go_back-- TRAINING
        |-------------------begin----------------^  |--mend---- TORN     <--tear----- TRAINING
    any --leave--> LEFT

Each transition lists the phases in which it is allowed, including those in which it changes
nothing; in any other phase it raises InternalError. Between two transitions the following holds:

1. A process in REPLAYING or LEFT sends its state to no peer and answers for no peer in an
   operation. In all other phases it has the job's state, which is complete except in TORN.
2. Only TRAINING begins to change the state. A process in TORN stays there until an update of the
   state has completed, or until another state has replaced it. A stop, leaving a loop, or a
   checkpoint that cannot be read does not complete it.
3. `stopped` has a reason in STOPPED and LEFT, and may have one in TORN; in the other phases steps
   continue. The reason never changes: a process that was asked to stop never trains again, and one
   that has left never returns.
4. A process without the job's state is never STOPPED. It leaves instead, because its script cannot
   report anything about that state.

The step itself records its progress (`step.py`); the formation records whether the group is
established. Owned by the training thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final

from shoal_common.errors import InternalError


class Phase(enum.Enum):
    """Phase of the script relative to its job."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and each step asks for a dozen

    REPLAYING = "replaying"
    """Holds nothing that counts: a joiner without the state, or a spare. Its requests are
    answered locally."""
    ARRIVING = "arriving"
    """Holds the job's state, but its script has not reached its peers' position: its requests
    are still answered locally."""
    TRAINING = "training"
    """Holds the job's state and takes its steps, or runs operations between them."""
    TORN = "torn"
    """An update is in progress, or raised half way through: the state must not be sent to
    anyone."""
    RETURNED = "returned"
    """The state is that of an older checkpoint; its script and those of its peers are at various
    positions after the steps that they will repeat. Until the next step begins, requests are
    answered locally."""
    STOPPED = "stopped"
    """No further step begins; operations between steps continue."""
    LEFT = "left"
    """Left while the others continue: it acts for nobody."""


_HOLDING: Final = frozenset(
    {Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED, Phase.STOPPED}
)


class ScriptPhase:
    """Phase of one process's script."""

    def __init__(self, *, live: bool) -> None:
        """`live`: its state is the job's from the start."""
        self.now = Phase.TRAINING if live else Phase.REPLAYING
        self.stopped: str | None = None
        """Reason why no further step begins; None while steps continue."""

    @property
    def holds_state(self) -> bool:
        """True if its state is the job's."""
        return self.now in _HOLDING

    @property
    def replaying(self) -> bool:
        """True if its script has not reached its peers' position, so that its requests are answered
        locally."""
        return self.now in (Phase.REPLAYING, Phase.ARRIVING)

    def begin(self) -> None:
        """Handles a rank in a job that has not begun."""
        self._move("begin", {Phase.REPLAYING: Phase.TRAINING})

    def be_alone(self) -> None:
        """Continues in a world of one after leaving at the end of its part: there are no peers to
        catch up with. A torn, stopped or left state stays so."""
        onward = (Phase.REPLAYING, Phase.ARRIVING, Phase.TRAINING, Phase.RETURNED)
        self._move(
            "be_alone",
            dict.fromkeys(onward, Phase.TRAINING),
            unchanged=(Phase.TORN, Phase.STOPPED, Phase.LEFT),
        )

    def sync(self) -> None:
        """Handles the job's state received at a step boundary. Changes nothing for members that
        held it, which may be anywhere in their scripts: a joiner may also enter a run that was
        stopped or has gone back."""
        self._move("sync", {Phase.REPLAYING: Phase.ARRIVING}, unchanged=_HOLDING)

    def arrive(self) -> None:
        """Handles the arrival at its first live batch, or the absence of peers ahead of it."""
        self._move("arrive", {Phase.ARRIVING: Phase.TRAINING})

    def fall_behind(self) -> None:
        """Handles that this batch was only looked at, so that the script is still before its loop.
        An error that leaves the loop in the middle of the batch's update changes nothing: the state
        is torn."""
        self._move("fall_behind", {Phase.TRAINING: Phase.ARRIVING}, unchanged=(Phase.TORN,))

    def set_aside(self) -> None:
        """Makes it a spare, since no replica could be formed with it. It will receive its peers'
        state, whatever its own is."""
        onward = (Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED)
        self._move(
            "set_aside", dict.fromkeys(onward, Phase.REPLAYING), unchanged=(Phase.REPLAYING,)
        )

    def tear(self) -> None:
        """Begins a change of the state."""
        self._move("tear", {Phase.TRAINING: Phase.TORN})

    def mend(self) -> None:
        """Ends the change: the state is complete."""
        self._move("mend", {Phase.TORN: self._whole})

    def replace(self) -> None:
        """Replaces its state with a peer's or a checkpoint's. Allowed at any time: a script may
        load a checkpoint before its loop, after it, and when it has left. Not for the arrival of a
        joiner (`sync`)."""
        others = frozenset(Phase) - {Phase.TORN, Phase.RETURNED}
        self._move(
            "replace", {Phase.TORN: self._whole, Phase.RETURNED: Phase.TRAINING}, unchanged=others
        )

    def go_back(self) -> None:
        """Handles the ranks' return to a checkpoint that replaces a lost state. If its state was
        replaced (`replace`), the script is ahead of it. A torn state was not replaced, so there was
        no checkpoint. A script that is arriving, or takes no further step, has no steps to
        repeat."""
        self._move(
            "go_back",
            {Phase.TRAINING: Phase.RETURNED},
            unchanged=(Phase.ARRIVING, Phase.TORN, Phase.RETURNED, Phase.STOPPED),
        )

    def resume(self) -> None:
        """Begins the next step: in a joiner's script possibly one that is only looked at, and in a
        torn one's a step that will not be applied."""
        self._move(
            "resume",
            {Phase.RETURNED: Phase.TRAINING},
            unchanged=(Phase.ARRIVING, Phase.TRAINING, Phase.TORN),
        )

    def stop(self, reason: str) -> None:
        """Stops: no further step begins here. A torn state stays torn."""
        onward = (Phase.TRAINING, Phase.RETURNED)
        self._move(
            "stop", dict.fromkeys(onward, Phase.STOPPED), unchanged=(Phase.STOPPED, Phase.TORN)
        )
        self.stopped = self.stopped or reason

    def leave(self, reason: str) -> None:
        """Leaves while the others continue."""
        self._move("leave", dict.fromkeys(Phase, Phase.LEFT))
        self.stopped = self.stopped or reason

    @property
    def _whole(self) -> Phase:
        return Phase.TRAINING if self.stopped is None else Phase.STOPPED

    def _move(
        self, name: str, onward: Mapping[Phase, Phase], *, unchanged: Collection[Phase] = ()
    ) -> None:
        """Moves from each key of `onward` to its value; stays in those of `unchanged`. Raises
        InternalError from any other phase."""
        if self.now in unchanged:
            return
        if self.now not in onward:
            allowed = sorted(phase.value for phase in {*onward, *unchanged})
            raise InternalError(
                f"{name}() was called in phase {self.now.value}; it is allowed only in "
                f"{', '.join(allowed)}",
                reason="PHASE_UNEXPECTED",
            )
        self.now = onward[self.now]
