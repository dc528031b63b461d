"""Joiners are fed at a border: who gives the state, who takes it, and what follows where nobody has
it.

Each rank says what it has to give; from what all have said, each concludes the same. All of it runs
on the training thread.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Sequence

from shoal_common.errors import MembershipChanged, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.committed_state import HeldState
from shoal_worker.elastic.divergence import borders_apart
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.loader_interface import LeftOver
from shoal_worker.elastic.operations import GroupChannel, spectate
from shoal_worker.elastic.phase import Phase
from shoal_worker.elastic.reconcile import StateName
from shoal_worker.elastic.step import ScriptPosition
from shoal_worker.elastic.transfer import StateExchange

_log = logging.getLogger(__name__)

_BORDER = "border"


class _Offer(enum.IntEnum):
    """What a rank gives to joiners."""

    NOTHING = 0
    STATE = 1
    NOTHING_DONE = 2
    """What the script began with, since the state that the job had is lost."""
    UNREADABLE = 3
    """Nothing: the checkpoint that is to take its place could not be read."""
    FED = 4
    """A peer's state, which it was fed itself and has taken no step with: its script may be a
    little behind the others'."""
    LEFT_OVER = 5
    """Nothing: it is a spare, or was about to be none, and its script is on its way in a state that
    is lost."""


class JoinerState:
    """This rank's part in it."""

    def __init__(
        self, held: HeldState, exchange: StateExchange | None, *, allow_restart: bool
    ) -> None:
        """`exchange`: None for strategies without a process group, which feed nobody.
        `allow_restart`: all progress may be lost."""
        self.fallback: Callable[[], bool] | None = None
        """Loads the newest checkpoint into this process, and says whether there was one; called if
        every process that held the state is gone."""
        self._held = held
        self._exchange = exchange
        self._allow_restart = allow_restart
        self._unreadable: ShoalError | None = None
        """Why the checkpoint could not be read, where this rank was to."""

    def feed(
        self, group: Group, spectators: Sequence[int], place: ScriptPosition
    ) -> ScriptPosition | None:
        """Gives the state to the ranks `spectators`, or takes it. All ranks of `group` call it.
        `place`: where this process's script stands.

        Returns where the peers stand if this process is a joiner and has any, else None.

        Raises:
            MembershipChanged: the group is over, or spares leave it.
            StateLostError: no rank holds some part of the state.
            LeftOver: this process is a spare that nobody can feed.
            PreconditionError: there is no state, or the ranks diverged; on all ranks
                alike.
        """
        held = self._held
        offer = self._meet(group, spectators, place)
        peers_at = None
        failpoint("session.at_border")
        offers = [_Offer(row[0]) for row in group.all_gather_integers([offer])]
        if offer is _Offer.LEFT_OVER:
            raise LeftOver(
                "every rank that held the whole model between them is gone, and this one is not at "
                "its script's beginning"
            )
        if _Offer.LEFT_OVER in offers:
            raise MembershipChanged(
                "every rank that held the whole model between them is gone, and spares end, to be "
                "started again"
            )
        donors = [r for r, each in enumerate(offers) if each is _Offer.STATE]
        donors = donors or [r for r, each in enumerate(offers) if each is _Offer.FED]
        anew = not donors and _Offer.NOTHING_DONE in offers
        if anew:
            donors = [offers.index(_Offer.NOTHING_DONE)]
        receivers = [r for r in spectators if r not in donors]
        if not donors and _Offer.UNREADABLE not in offers:
            raise PreconditionError(
                "no rank can give its state to the joiners; restart from a checkpoint"
            )
        if _Offer.UNREADABLE in offers:
            raise self._unreadable or PreconditionError(
                "every process that held the state of the run is gone, and the newest checkpoint "
                "could not be read: the log of the first rank says why; repair or remove it, and "
                "start the run again",
                reason="PROGRESS_LOST",
            )
        if anew:
            self._check_may_begin_anew()
        if group.rank in donors:
            name = held.name or held.begin(group.generation.number, None)
            captured = held.capture() if receivers else {}
            captured["operations"] = held.operations.encode()
            captured["outcomes"] = held.outcomes
            captured["state"] = list(name)
            captured["place"] = list(place) if held.phase.holds_state else None
            self._exchange_of_states.give(group, captured, until=lambda: group.exchange(b""))
        elif offer is _Offer.FED:
            group.exchange(b"")
        else:
            state = self._exchange_of_states.take(group, donors)
            group.exchange(b"")
            held.restore(state)
            held.operations.restart(state["operations"], passed=True)
            held.outcomes = state["outcomes"]
            held.name = StateName(*state["state"])
            peers_at = ScriptPosition(*state["place"]) if state["place"] is not None else None
        held.engine.regroup(group)
        held.phase.feed()
        if len(spectators) == group.world_size:
            held.phase.arrive()  # there are no others that it would have to come to
        return peers_at

    def _meet(self, group: Group, spectators: Sequence[int], place: ScriptPosition) -> _Offer:
        """Returns when all members stand at the border: what this rank gives there."""
        if group.rank not in spectators:
            places = [
                json.loads(told)
                for told in GroupChannel(group, _BORDER, tuple(spectators)).exchange(
                    json.dumps(place).encode()
                )
            ]
            if any(other != list(place) for other in places):
                raise borders_apart(places)
            if self._held.phase.now is Phase.TORN:
                return _Offer.NOTHING
            return _Offer.FED if self._held.phase.now is Phase.ARRIVING else _Offer.STATE
        if len(spectators) < group.world_size:
            spectate(group, tuple(spectators), _BORDER)
            return _Offer.NOTHING
        # Nobody who held the state is left: the lowest rank starts again, from the newest
        # checkpoint if the script resumes from one.
        if self._held.engine.in_parts:
            return _Offer.LEFT_OVER
        if group.rank == spectators[0]:
            try:
                if self.fallback is not None and self.fallback():
                    return _Offer.STATE
            except ShoalError as error:
                self._unreadable = error
                return _Offer.UNREADABLE
        return _Offer.NOTHING_DONE

    def _check_may_begin_anew(self) -> None:
        """Raises PreconditionError (PROGRESS_LOST), on all ranks alike, unless that is allowed."""
        what = (
            "every process that held the state of the run is gone, and no checkpoint was taken "
            "up: training begins anew, at step 0"
        )
        if not self._allow_restart:
            raise PreconditionError(
                f"{what}. That loses all progress: save checkpoints, and call shoal.resume(...) "
                "before the loop; or allow it by `shoal run --allow-restart-from-scratch` "
                "(SHOAL_ALLOW_RESTART_FROM_SCRATCH=1)",
                reason="PROGRESS_LOST",
            )
        _log.warning("%s, as SHOAL_ALLOW_RESTART_FROM_SCRATCH allows", what)

    @property
    def _exchange_of_states(self) -> StateExchange:
        assert self._exchange is not None
        return self._exchange
