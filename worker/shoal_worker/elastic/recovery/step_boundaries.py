"""Step boundaries: the only points where joiners enter, drained members leave and failed groups
re-form.

A member that is asked to leave continues for a short time (SHOAL_DRAIN_GRACE_S). If all ranks are
asked within that time, for example because an allocation is reclaimed, all stop together. Their
scripts continue and can save their joint state. Otherwise, the member leaves alone, unless it has a
part of the state that no remaining rank has (`who_leaves`).

`StepBoundaries` owns two values: the peers' position when this process, as a joiner, received the
state, and the time when this process was asked to leave. It uses the `Formation` until the process
leaves its job. All methods run on the training thread.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import xxhash
from shoal_common.errors import MembershipChanged
from shoal_common.exit_status import EVICTED

from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.contract.loader_interface import (
    Drained,
    Placement,
    StepSource,
    StopTraining,
)
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.step import ScriptPosition, Step
from shoal_worker.elastic.coordinator.member import LeaveReason, Member
from shoal_worker.elastic.recovery.formation import GROUP_LOST, Formation
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.strategy_interface import TrainingEngine

# ----------------------------------------------------------------------------- how a process leaves


@dataclass(frozen=True, kw_only=True)
class BoundaryMessage:
    """Message that each rank sends about itself at a step boundary."""

    asked: bool
    """True if this rank has been asked to leave."""
    excluded: bool
    """True if the coordinator has formed a generation without this rank. This rank then leaves at
    this boundary."""
    holds: Sequence[str]
    """Names of this rank's parts of the state; a part has the same name on all ranks."""
    stopping: bool
    """True if this rank knows that the job is stopping. All ranks then leave at the same boundary,
    which the next commit all-reduce determines."""
    joiners: bool
    """True if this rank knows of a newer generation with additional members."""


@dataclass(frozen=True, kw_only=True)
class WhoLeaves:
    """Decision about which ranks leave at a step boundary."""

    now: frozenset[int]
    """Ranks that leave at this boundary."""
    stop: bool
    """True if all ranks must stop, because the ranks that have been asked to leave cannot leave
    without a loss of state."""


def who_leaves(messages: Sequence[BoundaryMessage]) -> WhoLeaves:
    """Decides which ranks leave at a step boundary. `messages`: all ranks' messages, in rank order.
    Must be called on every rank, with the same list.

    As many ranks leave as possible without losing parts of the state. If two ranks have the only
    copies of a shard, one leaves now. The remaining ranks reshard the state, and the other can
    leave at a later boundary. If no rank can leave, for example because the last replica of a model
    would lose a rank, all ranks stop together. Their scripts continue, and can save their joint
    state.
    """
    if any(each.stopping for each in messages):
        return WhoLeaves(now=frozenset(), stop=False)
    copies = Counter(part for each in messages for part in each.holds)
    now: set[int] = set()
    for rank, each in sorted(enumerate(messages), key=lambda one: (not one[1].excluded, one[0])):
        if not each.asked:
            continue
        if each.excluded or all(copies[part] > 1 for part in each.holds):
            now.add(rank)
            copies.subtract(each.holds)
    lost = any(count < 1 for count in copies.values())
    stuck = (
        not now
        and any(each.asked for each in messages)
        and not any(each.joiners for each in messages)
    )
    return WhoLeaves(now=frozenset() if lost or stuck else frozenset(now), stop=lost or stuck)


_log = logging.getLogger(__name__)


class Departure:
    """Ends this process's part in the run: when its job stops, when it drains, or when its script
    has finished. Records why training must stop, and leaves the job exactly once."""

    def __init__(self, membership: Member | None, held: CommittedState) -> None:
        self._membership = membership
        self._held = held
        self._callbacks: list[Callable[[], None]] = []

    @property
    def stopped(self) -> str | None:
        """Reason why this process does not begin further steps; None while steps continue.
        Operations between steps remain possible."""
        return self._held.phase.stopped

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs once, before this process leaves."""
        self._callbacks.append(callback)

    def obey(self, stop: StopTraining) -> None:
        """Stops training for the reason given by `stop`. If only this member leaves (`Drained`),
        and training has not stopped before, exits the process.

        Raises:
            SystemExit: with status 0, because this member was drained.
            PreconditionError (MEMBER_BEHIND): the run has finished with steps that this process
                does not have. The process has already left the job.
        """
        self._leave_if_behind()
        if self.stopped is None and isinstance(stop, Drained):
            self.exit_drained(str(stop))
        self._held.phase.stop(str(stop))

    def _leave_if_behind(self) -> None:
        membership, held = self._membership, self._held
        if (
            membership is None
            or not held.phase.holds_state
            or (held.has_engine and held.engine.asynchronous)
        ):
            return
        ended_with = membership.link.finished_steps
        if ended_with is not None and ended_with > held.steps:
            membership.give_up_place(
                f"the run ended with step {ended_with}, but this process has only {held.steps} "
                "steps, so its state is not the result of the run"
            )

    def exit_drained(self, reason: str) -> NoReturn:
        """Leaves the job and exits the process with status 0. The remaining members continue
        training, and do not wait for data that this process is still writing."""
        self._exit(reason, status=0)

    def exit_spare(self, why: str) -> NoReturn:
        """Exits this process because it is a spare and cannot continue at its script's current
        position. The process that replaces it waits at the beginning of the loop."""
        reason = f"{why}; this process exits to be restarted"
        _log.warning("%s", reason)
        self._exit(reason, status=EVICTED)

    def _exit(self, reason: str, *, status: int) -> NoReturn:
        _log.info("leaving: %s", reason)
        self._held.phase.leave(reason)  # the end of the script must not wait for peers
        for source in self._held.sources:
            source.leaving()
        if self._membership is not None and not (
            self._held.has_engine and self._held.engine.asynchronous
        ):
            self._membership.leave(LeaveReason.DRAINED, reason, alone=True)
        self.send_leave(LeaveReason.DRAINED, reason, alone=True)
        raise SystemExit(status)

    def finish(self) -> None:
        """Runs the callbacks registered with `on_leave`, unless they have already run."""
        while self._callbacks:
            self._callbacks.pop()()

    def send_leave(self, reason: LeaveReason, detail: str = "", *, alone: bool = False) -> str:
        """Leaves the job after running the callbacks registered with `on_leave`. If this process
        has already left, only runs the callbacks. `alone`: True if only this process leaves, and
        its peers continue. Returns the result of `Member.leave`."""
        self.finish()
        if self._membership is None:
            return ""
        held = self._held.last_state if not alone else None
        return self._membership.leave(
            reason, detail, alone=alone, steps=self._held.steps, held=held
        )


# -------------------------------------------------------------------------------- step boundaries

ALONE = Placement(generation=0, rank=0, world_size=1)
"""Placement in a world of one, and before the first generation."""


class StepBoundaries:
    """Handles membership changes between two steps, and keeps the requests from a step vote until
    the next boundary."""

    def __init__(
        self, held: CommittedState, formation: Formation | None, *, drain_grace: timedelta
    ) -> None:
        """`formation`: None in a world of one."""
        self._held = held
        self._formation = formation
        self._drain_grace = drain_grace
        self._asked_at: float | None = None
        self._all_leave_in: int | None = None
        """Generation with a rank that has been asked to leave but is indispensable; None if there
        is none. All ranks of that generation then act as if they had been asked too."""
        self._peers_at: ScriptPosition | None = None

    @property
    def placement(self) -> Placement:
        """This process's current placement."""
        generation = self._formation.generation if self._formation is not None else None
        if generation is None:
            return ALONE
        if not self._held.has_engine:
            return Placement(
                generation=generation.number, rank=generation.rank, world_size=generation.world_size
            )
        engine = self._held.engine
        return Placement(
            generation=generation.number,
            rank=engine.data_parallel_rank,
            world_size=engine.data_parallel_size,
            leads_replica=engine.leads_replica,
            least_samples=engine.least_samples,
        )

    @property
    def generation(self) -> int:
        """Number of this process's current generation; 0 before the first, and in a world of
        one."""
        generation = self._formation.generation if self._formation is not None else None
        return 0 if generation is None else generation.number

    def peers_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Returns whether the peers were in a loop other than epoch `epoch` of `source` when they
        sent the state to this joiner. Returns False if there are no peers."""
        at = self._peers_at
        return at is not None and (at.loader, at.epoch) != (source.name, epoch)

    def settle(self, source: StepSource | None) -> None:
        """Handles all joins, failures, drains and stops since the last step boundary, before a step
        of `source`. Waits while this process is a spare.

        Raises:
            StopTraining: the job is stopped, or (`Drained`) this member leaves it.
            ShoalError: the coordinator evicted this member.
        """
        formation = self._formation
        if formation is None:
            return
        link = formation.membership.link
        if self._held.engine.asynchronous:
            # Within a round, no rank leaves voluntarily, because the changes of the round's steps
            # would be lost.
            if link.refused is not None or not self._held.engine.within_round:
                self._leave_if_asked(formation, stop=link.stopped)
            return
        if self._held.engine.idle:
            self._await_ranks(formation, source)
            return
        if self._held.in_round or formation.must_move:
            # all ranks finish a round in any case, and a step that is aborted at this boundary must
            # have begun
            return
        if not self._held.phase.holds_state:
            link.ready()
            formation.reform()
        elif formation.stop_due:
            # A stop that this rank knows of is ignored here, because ranks that do not know of it
            # would continue.
            self._leave_if_asked(
                formation, stop=link.stopped or link.draining or "the job is stopped"
            )
        elif formation.boundary_due:
            self._leave_in_turn(formation)
            formation.take_newest()
        else:
            formation.settle()
        self._let_joiners_in(formation, source)
        self._await_ranks(formation, source)

    def _await_ranks(self, formation: Formation, source: StepSource | None) -> None:
        """Waits while this process is a spare. Also waits while there are too few ranks for a
        replica, unless this rank's script must advance first, or `source` has no further step
        because the received state is already the run's final state."""
        engine = self._held.engine
        while engine.idle or (
            engine.lacks_ranks
            and not formation.must_move
            and not (source is not None and source.is_over)
        ):
            if engine.idle:
                formation.wait_as_spare()
            else:
                formation.await_ranks()
            self._let_joiners_in(formation, source)

    def _let_joiners_in(self, formation: Formation, source: StepSource | None) -> None:
        if formation.joiners_wait:
            # A joiner's script is behind the peers that sent it the state, although no step has
            # been taken since then. It therefore reports its peers' position to other ranks.
            arriving = self._peers_at if self._held.phase.now is Phase.ARRIVING else None
            peers_at = formation.let_joiners_in(arriving or self._held.place(source))
            if peers_at is not None:
                self._peers_at = peers_at

    def settled(self, placement: Placement) -> bool:
        """Returns whether `placement`, which was returned earlier at this boundary, is still valid.
        An operation may have formed a new group in the meantime."""
        formation = self._formation
        if formation is None:
            return True
        if self._held.engine.asynchronous:
            # called repeatedly while the rank waits for a batch
            link = formation.membership.link
            healthy = link.stopped is None and link.draining is None
        else:
            healthy = formation.healthy
        quiet = healthy and not formation.boundary_due and not formation.stop_due
        return self._held.phase.holds_state and quiet and placement == self.placement

    def step_vote(self, step: Step) -> list[float]:
        """Returns the numbers that this rank contributes to the step vote: its requests for the
        next boundary, and its position in the script."""
        place, settings = self._held.place(step.source), self._held.registered.settings_digest()
        if step.of:
            place = place._replace(
                dealing=xxhash.xxh3_64_intdigest(f"{place.dealing} {step.of}".encode())
            )
        if self._formation is None:
            return step.step_vote(
                boundary_wanted=False,
                stop_announced=False,
                leaving=False,
                settings=settings,
                place=place,
            )
        membership = self._formation.membership
        link, group = membership.link, membership.group
        return step.step_vote(
            boundary_wanted=group is None
            or link.newest > group.generation.number
            or link.refused is not None
            or self._leaves_alone,
            stop_announced=link.stopped is not None,
            leaving=link.draining is not None
            or (group is not None and group.generation.number == self._all_leave_in),
            settings=settings,
            place=place,
        )

    @property
    def _leaves_alone(self) -> bool:
        """True if this process has been asked to leave, and the grace period is over. By then, its
        peers would have reported that they have been asked too."""
        if self._formation is None or self._formation.membership.link.draining is None:
            return False
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return time.monotonic() - self._asked_at >= self._drain_grace.total_seconds()

    def committed(self, step: Step) -> None:
        """Records a committed step and its vote's requests for the next boundary. A joiner has
        caught up with its peers once it has committed a step."""
        self._peers_at = None
        if self._formation is not None:
            asked = step.requests
            self._formation.committed(
                boundary_due=asked.boundary,
                stop_due=asked.stop or asked.all_leave,
                preempted=asked.all_leave and not asked.stop,
            )

    def ask(self, reason: str) -> None:
        """Forms the next generation after the current step's group has failed. In that generation,
        the ranks tell each other whether the step is committed. Returns as soon as this rank knows
        the outcome. Raises StopTraining."""
        formation = self._formation
        if formation is not None:
            formation.end_group(MembershipChanged(reason), in_operation=False)
            formation.rendezvous()

    def step_ended(self, engine: TrainingEngine, *, updated: bool) -> None:
        """Forms a new group before the script receives the step's outcome, if the group has failed
        in the step. `updated`: True if the step is committed. Raises StopTraining."""
        formation = self._formation
        if formation is not None and not engine.asynchronous and not self._held.in_round:
            formation.settle(updated=updated and engine.is_sharded)

    @property
    def finished_steps(self) -> int | None:
        """Number of committed steps of a peer whose script has finished; None if no such peer is
        known."""
        formation = self._formation
        return formation.membership.link.finished_steps if formation is not None else None

    def went_back(self) -> None:
        """Records that all ranks have replaced a lost state with a checkpoint's state."""
        if self._formation is not None:
            self._formation.went_back()

    def leave_peers(self) -> None:
        """Switches to a world of one after this process has left its job."""
        self._formation = None

    def _leave_in_turn(self, formation: Formation) -> None:
        """Leaves the job if this process has been asked to leave and the others do not need it. If
        the state is sharded, ranks that were asked at the same time leave one after another, so
        that the remaining ranks keep the complete state; see `who_leaves`. Raises Drained, or
        ShoalError if this member was evicted."""
        engine, link = self._held.engine, formation.membership.link
        if not engine.is_sharded or link.refused is not None:
            self._leave_if_asked(formation, stop=None)
            return
        if not formation.healthy:
            return  # a peer has failed, and this rank may have the only copy of its part
        try:
            mine = BoundaryMessage(
                asked=self._leaves_alone or link.excluded,
                excluded=link.excluded,
                holds=tuple(engine.holds),
                stopping=link.stopped is not None,
                joiners=_has_others(link.newest_generation, formation.members),
            )
            channel = formation.channel("leaving")
            messages = [
                BoundaryMessage(**json.loads(each))
                for each in channel.exchange(json.dumps(asdict(mine)).encode())
            ]
        except GROUP_LOST as error:
            formation.recover(error)
            return
        plan = who_leaves(messages)
        number = formation.group.generation.number if formation.group is not None else None
        if plan.stop and self._all_leave_in != number:
            asked = [rank for rank, each in enumerate(messages) if each.asked]
            _log.warning(
                "ranks %s were asked to leave, but hold parts of the state that no other rank "
                "has; all ranks stop",
                asked,
            )
        # The ranks do not stop at this boundary, because a rank that missed the message would
        # continue. The next commit all-reduce informs either all ranks or none.
        self._all_leave_in = number if plan.stop else None
        if plan.now:
            try:
                engine.keep_two_copies(channel, plan.now)
            except GROUP_LOST as error:
                formation.recover(error)
                return
        if channel.rank in plan.now:
            raise Drained(link.draining or "")
        if not plan.now and not any(each.joiners for each in messages):
            formation.boundary_due = False  # no other generation will form

    def _leave_if_asked(self, formation: Formation, *, stop: str | None) -> None:
        membership = formation.membership
        if membership.link.refused is not None:
            membership.leave_group("the coordinator evicted this member")
            raise membership.link.refused
        if stop is not None:
            raise StopTraining(stop)
        if membership.link.draining is not None and (
            self._held.engine.asynchronous or self._leaves_alone
        ):
            raise Drained(membership.link.draining)


def _has_others(newest: Generation | None, members: Collection[str]) -> bool:
    """Returns whether generation `newest` has members other than `members`. Raises one of the
    errors in GROUP_LOST if the generation's members are unknown."""
    return newest is not None and any(peer.member_id not in members for peer in newest.peers)
