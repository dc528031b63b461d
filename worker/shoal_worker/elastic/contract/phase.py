"""Phase of this process's script in its job, changed by named transitions. No I/O.

    REPLAYING --sync--> ARRIVING --arrive--> TRAINING --stop--> STOPPED
        |  ^                ^-----fall_behind----|  ^
        |  |------------set_aside----------------|  |--resume-- RETURNED <--go_back-- TRAINING
        |-------------------begin----------------^  |--mend---- TORN     <--tear----- TRAINING
    any --leave--> LEFT

Each transition lists the phases in which it is allowed, including phases that it does not change.
In any other phase, it raises InternalError. Between two transitions, the following holds:

1. A process in REPLAYING or LEFT does not send its state to peers or take part in their operations.
   In all other phases it has the job's state, which is complete except in TORN.
2. A change to the state can begin only in TRAINING. A process in TORN stays there until an update
   of the state has completed, or until the state has been replaced. Stopping, leaving a loop, or
   failing to read a checkpoint does not end TORN.
3. `stopped` has a reason in STOPPED and LEFT, and may have one in TORN; in the other phases, steps
   continue. The reason never changes: a process that was asked to stop never trains again, and a
   process that has left never returns.
4. A process without the job's state is never STOPPED. It leaves instead, because its script has no
   results to report.

The step itself records its progress (`step.py`); the formation records whether the group is
established. Owned by the training thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final

from shoal_common.errors import InternalError


class Phase(enum.Enum):
    """Phase of a process's script in its job."""

    __hash__ = object.__hash__  # Enum's own is slow, and is called a dozen times per step

    REPLAYING = "replaying"
    """The process does not have the job's state: it is a joiner before it receives the state, or a
    spare. Its script's calls are answered locally."""
    ARRIVING = "arriving"
    """The process has the job's state, but its script has not reached its peers' position: the
    script's calls are still answered locally."""
    TRAINING = "training"
    """The process has the job's state and takes its steps, or runs operations between them."""
    TORN = "torn"
    """An update is in progress, or has raised an exception before it was complete. The state must
    not be sent to any rank."""
    RETURNED = "returned"
    """The state was restored from an older checkpoint. The scripts of this process and of its peers
    are ahead of the state, at different positions. Until the next step begins, the script's calls
    are answered locally."""
    STOPPED = "stopped"
    """No further step begins; operations between steps continue."""
    LEFT = "left"
    """The process left while the others continue. It no longer takes part in the job."""


_HOLDING: Final = frozenset(
    {Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED, Phase.STOPPED}
)


class ScriptPhase:
    """State machine for the phase of one process's script."""

    def __init__(self, *, live: bool) -> None:
        """`live`: True if this process has the job's state from the start."""
        self.now = Phase.TRAINING if live else Phase.REPLAYING
        self.stopped: str | None = None
        """Reason why no further step begins; None while steps continue."""

    @property
    def holds_state(self) -> bool:
        """True if this process has the job's state."""
        return self.now in _HOLDING

    @property
    def replaying(self) -> bool:
        """True if this process's script has not reached its peers' position. The script's calls are
        then answered locally."""
        return self.now in (Phase.REPLAYING, Phase.ARRIVING)

    def begin(self) -> None:
        """Enters TRAINING as a rank of a job that has not begun."""
        self._move("begin", {Phase.REPLAYING: Phase.TRAINING})

    def be_alone(self) -> None:
        """Continues in a world of one after this process has left its job: there are no peers to
        catch up with. Does not change the phases TORN, STOPPED and LEFT."""
        onward = (Phase.REPLAYING, Phase.ARRIVING, Phase.TRAINING, Phase.RETURNED)
        self._move(
            "be_alone",
            dict.fromkeys(onward, Phase.TRAINING),
            unchanged=(Phase.TORN, Phase.STOPPED, Phase.LEFT),
        )

    def sync(self) -> None:
        """Enters ARRIVING after the job's state has been received at a step boundary. Changes
        nothing in a process that already had the state. Such a process may be in any phase, because
        a joiner may also enter a run that was stopped or has returned to a checkpoint."""
        self._move("sync", {Phase.REPLAYING: Phase.ARRIVING}, unchanged=_HOLDING)

    def arrive(self) -> None:
        """Enters TRAINING when the script reaches its first training batch, or if no peer is ahead
        of it."""
        self._move("arrive", {Phase.ARRIVING: Phase.TRAINING})

    def fall_behind(self) -> None:
        """Returns to ARRIVING, because the script has only looked at a batch and has not begun its
        training loop yet. Does nothing in TORN, which follows an error in the middle of an
        update."""
        self._move("fall_behind", {Phase.TRAINING: Phase.ARRIVING}, unchanged=(Phase.TORN,))

    def set_aside(self) -> None:
        """Makes this process a spare, because too few ranks are left for a replica that includes
        it. It will discard its state and receive its peers' state."""
        onward = (Phase.ARRIVING, Phase.TRAINING, Phase.TORN, Phase.RETURNED)
        self._move(
            "set_aside", dict.fromkeys(onward, Phase.REPLAYING), unchanged=(Phase.REPLAYING,)
        )

    def tear(self) -> None:
        """Enters TORN, because a change to the state is beginning."""
        self._move("tear", {Phase.TRAINING: Phase.TORN})

    def mend(self) -> None:
        """Leaves TORN, because the change has finished and the state is complete."""
        self._move("mend", {Phase.TORN: self._whole})

    def replace(self) -> None:
        """Records that a peer's or a checkpoint's state has replaced this process's own. Allowed at
        any time, because a script may load a checkpoint before its loop, after it, or after
        leaving. A joiner that receives the state calls `sync` instead."""
        others = frozenset(Phase) - {Phase.TORN, Phase.RETURNED}
        self._move(
            "replace", {Phase.TORN: self._whole, Phase.RETURNED: Phase.TRAINING}, unchanged=others
        )

    def go_back(self) -> None:
        """Records that the ranks returned to a checkpoint because their state was lost. If a
        checkpoint's state replaced this process's state (`replace`), its script is now ahead of the
        state. If there was no checkpoint, the state was not replaced, and TORN does not change.
        ARRIVING and STOPPED do not change either, because in these phases the script has no steps
        to repeat."""
        self._move(
            "go_back",
            {Phase.TRAINING: Phase.RETURNED},
            unchanged=(Phase.ARRIVING, Phase.TORN, Phase.RETURNED, Phase.STOPPED),
        )

    def resume(self) -> None:
        """Records that the next step begins. ARRIVING does not change, because a joiner's script
        may merely look at the step's batch. TORN does not change either, because the step will not
        be applied."""
        self._move(
            "resume",
            {Phase.RETURNED: Phase.TRAINING},
            unchanged=(Phase.ARRIVING, Phase.TRAINING, Phase.TORN),
        )

    def stop(self, reason: str) -> None:
        """Enters STOPPED, so that this process begins no further step. TORN stays TORN."""
        onward = (Phase.TRAINING, Phase.RETURNED)
        self._move(
            "stop", dict.fromkeys(onward, Phase.STOPPED), unchanged=(Phase.STOPPED, Phase.TORN)
        )
        self.stopped = self.stopped or reason

    def leave(self, reason: str) -> None:
        """Enters LEFT, while the other members continue."""
        self._move("leave", dict.fromkeys(Phase, Phase.LEFT))
        self.stopped = self.stopped or reason

    @property
    def _whole(self) -> Phase:
        return Phase.TRAINING if self.stopped is None else Phase.STOPPED

    def _move(
        self, name: str, onward: Mapping[Phase, Phase], *, unchanged: Collection[Phase] = ()
    ) -> None:
        """Performs the transition `name`: changes a phase in `onward` to its value there, and does
        not change a phase in `unchanged`. Raises InternalError in any other phase."""
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
