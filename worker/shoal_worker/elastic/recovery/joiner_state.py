"""Transfers the state to joiners at a step boundary: selects senders and receivers, and handles the
case that no rank has the state.

Each rank announces which state it can send, and all ranks make the same decision from all
announcements. All methods run on the training thread.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from shoal_common.errors import MembershipChanged, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.loader_interface import LeftOver
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.step import ScriptPosition
from shoal_worker.elastic.group.divergence import boundaries_apart
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import GroupChannel, follow_as_learner
from shoal_worker.elastic.group.transfer import StateExchange
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.state.digest import describe_values
from shoal_worker.state.tree import flatten

_log = logging.getLogger(__name__)

_BOUNDARY = "border"


class _Offer(enum.IntEnum):
    """A rank's announcement of the state that it can send to joiners."""

    NOTHING = 0
    STATE = 1
    NOTHING_DONE = 2
    """The job's state is lost, and this rank has only its script's initial, untrained state."""
    UNREADABLE = 3
    """The rank has no state, because it could not read the checkpoint that should replace the lost
    state."""
    RECEIVED = 4
    """The rank has a state that it has received from a peer, and has not taken a step since. Its
    script may be slightly behind the others."""
    LEFT_OVER = 5
    """The rank has no state: it is a spare, or about to become a spare, and its script has used a
    state that is now lost."""


_REPLICA = "replica/"
"""Prefix of the names of the engine's tensors in a captured state."""


class JoinerState:
    """Transfers the state to joiners. All ranks take part."""

    def __init__(
        self, held: CommittedState, exchange: StateExchange | None, *, allow_restart: bool
    ) -> None:
        """`exchange`: None under strategies without a process group, which do not transfer state.
        `allow_restart`: True if training may restart from scratch when the state is lost."""
        self.fallback: Callable[[], bool] | None = None
        """Loads the newest checkpoint into this process and returns whether there was one. Called
        if no process with the state remains. The attribute is None if the script does not resume
        from a checkpoint."""
        self._held = held
        self._exchange = exchange
        self._allow_restart = allow_restart
        self._unreadable: ShoalError | None = None
        """Reason why this rank could not read the checkpoint."""

    def sync(
        self, group: Group, learners: Sequence[int], place: ScriptPosition
    ) -> ScriptPosition | None:
        """Transfers the state to the ranks `learners`: sends it, receives it, or waits until the
        other ranks have done so. Must be called on all ranks of `group`. `place`: this process's
        position in the script.

        Returns the peers' position if this process is a joiner and has peers, otherwise None.

        Raises:
            MembershipChanged: the group has ended, or its spares exit.
            StateLostError: part of the state is missing on all ranks.
            LeftOver: this process is a spare, and no rank can send it the state.
            PreconditionError: no rank has a state, or the scripts have diverged. Raised on all
                ranks.
        """
        held = self._held
        offer = self._rendezvous(group, learners, place)
        peers_at = None
        failpoint("session.at_boundary")
        own = held.frozen_values() if offer is _Offer.NOTHING else {}
        rows = group.all_gather_integers([offer, len(own)])
        offers, owns = [_Offer(row[0]) for row in rows], [row[1] for row in rows]
        if offer is _Offer.LEFT_OVER:
            raise LeftOver(
                "all ranks that held parts of the model are gone, and this rank's script is past "
                "its beginning, where it could load a checkpoint"
            )
        if _Offer.LEFT_OVER in offers:
            raise MembershipChanged(
                "all ranks that held parts of the model are gone; the spares exit so that their "
                "launchers restart them"
            )
        donors = [r for r, each in enumerate(offers) if each is _Offer.STATE]
        donors = donors or [r for r, each in enumerate(offers) if each is _Offer.RECEIVED]
        anew = not donors and _Offer.NOTHING_DONE in offers
        if anew:
            donors = [offers.index(_Offer.NOTHING_DONE)]
        receivers = [r for r in learners if r not in donors]
        if not donors and _Offer.UNREADABLE not in offers:
            raise PreconditionError(
                "no rank can send its state to the joiners; restart from a checkpoint"
            )
        if _Offer.UNREADABLE in offers:
            raise self._unreadable or PreconditionError(
                "no worker with the run's state is left, and the newest checkpoint could not be "
                "read. See the log of rank 0, repair or remove the checkpoint, and start the run "
                "again",
                reason="PROGRESS_LOST",
            )
        if anew:
            self._check_may_begin_anew()
        takers = [
            r for r, each in enumerate(offers) if r not in donors and each is not _Offer.RECEIVED
        ]
        has_frozen = bool(takers) and all(owns[r] for r in takers)
        if group.rank in donors:
            name = held.name or held.begin(group.generation.number, None)
            captured = held.capture() if receivers else {}
            captured["operations"] = held.operations.encode()
            captured["outcomes"] = held.outcomes
            captured["built"] = dict(held.built)
            captured["state"] = list(name)
            captured["place"] = list(place) if held.phase.holds_state else None
            here = _frozen_in(captured, held.frozen) if has_frozen else {}
            alike = _alike(group, donors[0], takers, here) if has_frozen else ()
            self._exchange_of_states.give(
                group, captured, until=lambda: group.exchange(b""), without=alike
            )
        elif offer is _Offer.RECEIVED:
            if has_frozen:
                _alike(group, donors[0], takers, {})
            group.exchange(b"")
        else:
            here = {f"{_REPLICA}{name}": value for name, value in own.items()}
            alike = _alike(group, donors[0], takers, here) if has_frozen else ()
            state = self._exchange_of_states.take(
                group, donors, own={name: here[name].detach().cpu().clone() for name in alike}
            )
            group.exchange(b"")
            held.restore(state)
            held.operations.restart(state["operations"], passed=True)
            held.outcomes = state["outcomes"]
            held.built = state["built"]
            held.name = StateName(*state["state"])
            peers_at = ScriptPosition(*state["place"]) if state["place"] is not None else None
        held.engine.reshard(group)
        held.phase.sync()
        if len(learners) == group.world_size:
            held.phase.arrive()  # no peers are ahead of its script
        return peers_at

    def _rendezvous(self, group: Group, learners: Sequence[int], place: ScriptPosition) -> _Offer:
        """Waits until all members are at the step boundary. Returns this rank's announcement."""
        if group.rank not in learners:
            places = [
                json.loads(reply)
                for reply in GroupChannel(group, _BOUNDARY, tuple(learners)).exchange(
                    json.dumps(place).encode()
                )
            ]
            if any(other != list(place) for other in places):
                raise boundaries_apart(places)
            if self._held.phase.now is Phase.TORN:
                return _Offer.NOTHING
            return _Offer.RECEIVED if self._held.phase.now is Phase.ARRIVING else _Offer.STATE
        if len(learners) < group.world_size:
            follow_as_learner(group, tuple(learners), _BOUNDARY)
            return _Offer.NOTHING
        # No rank with the state is left. The lowest rank restarts from the newest checkpoint if the
        # script resumes from one.
        if self._held.engine.is_sharded:
            return _Offer.LEFT_OVER
        if group.rank == learners[0]:
            try:
                if self.fallback is not None and self.fallback():
                    return _Offer.STATE
            except ShoalError as error:
                self._unreadable = error
                return _Offer.UNREADABLE
        return _Offer.NOTHING_DONE

    def _check_may_begin_anew(self) -> None:
        """Checks that training may restart from scratch; otherwise raises PreconditionError
        (PROGRESS_LOST), on all ranks."""
        what = (
            "no worker with the run's state is left, and no checkpoint was loaded: training "
            "restarts at step 0"
        )
        if not self._allow_restart:
            raise PreconditionError(
                f"{what}. That would lose all progress. Save checkpoints, and call "
                "shoal.resume(...) before the loop; or allow a restart with `shoal run "
                "--allow-restart-from-scratch` (SHOAL_ALLOW_RESTART_FROM_SCRATCH=1)",
                reason="PROGRESS_LOST",
            )
        _log.warning("%s (SHOAL_ALLOW_RESTART_FROM_SCRATCH is set)", what)

    @property
    def _exchange_of_states(self) -> StateExchange:
        assert self._exchange is not None
        return self._exchange


def _frozen_in(captured: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Returns the frozen parameters in `names` that a captured state contains, keyed by their names
    in the flattened state."""
    tensors = flatten(captured)[1]
    return {name: tensors[name] for each in names if (name := f"{_REPLICA}{each}") in tensors}


def _alike(
    group: Group, donor: int, receivers: Sequence[int], here: Mapping[str, torch.Tensor]
) -> Collection[str]:
    """Returns the names of the frozen parameters whose values all receivers already have, so that
    the donors do not have to send them. `here`: the values on this rank. Must be called on all
    ranks."""
    involved = group.rank == donor or group.rank in receivers
    own = {name: describe_values(value) for name, value in here.items()} if involved else {}
    described = [json.loads(each) for each in group.exchange(json.dumps(own).encode())]
    return [
        name
        for name, value in described[donor].items()
        if all(described[receiver].get(name) == value for receiver in receivers)
    ]
