"""Forms generations until one is established, and admits joiners.

- The ranks of a new generation first *meet*: each rank sends its status, and all ranks make the
  same decision (`reconcile.py`). If they agree on the state, the generation is *established*, and
  sharded state is distributed across its ranks. Otherwise, the scripts of some ranks must advance
  first. These ranks receive what they need for that: the result of the commit all-reduce of a step
  whose outcome they do not know, or results of operations. This group is then abandoned, and the
  other ranks wait for the next one. The scripts of all members of an established generation have
  therefore received the same outcomes.
- Only two kinds of ranks receive state from peers: joiners, and ranks that have not loaded a
  checkpoint that their peers have loaded. If a rank in doubt about a step learns that the step is
  committed, it applies the step itself.
- A rank may be cut off while its peers take steps without it. When it meets its peers again, it
  leaves, and its process exits and is replaced, because its script is in an operation or a step
  that the peers have already finished.
- A joiner is a learner in its first generation until all other ranks are at a step boundary, where
  it receives the state. It therefore never receives a state that user code may be changing.

`Formation` owns these facts: whether the group is established, the set of learners, whether a step
boundary is due, and the time of the last failure. All methods run on the training thread, but a
collective's callback may call `failed`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    MembershipChanged,
    PreconditionError,
    UnavailableError,
)
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.contract.loader_interface import Drained, StateLostError, StopTraining
from shoal_worker.elastic.contract.reconcile import (
    RANK_STATUS_LENGTH,
    Interrupted,
    RankStatus,
    Reconciliation,
    StateName,
    reconcile,
)
from shoal_worker.elastic.contract.step import ScriptPosition
from shoal_worker.elastic.coordinator.member import Member
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.divergence import operations_apart
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import GroupChannel, follow_as_learner
from shoal_worker.elastic.group.transfer import StateExchange
from shoal_worker.elastic.group.waiting import WaitingLines, Where
from shoal_worker.elastic.recovery.joiner_state import JoinerState
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from shoal_worker.state.digest import state_digest

_log = logging.getLogger(__name__)

GROUP_LOST = (MembershipChanged, UnavailableError)
"""Errors of a collective or a transfer whose group has ended. A new generation must be formed."""

_BRINGING, _TOGETHER = "bringing together", "together"
_SPARE_LOOK = timedelta(seconds=0.2)
"""Interval between a spare's checks that its peers still exist."""


class Formation:
    """Forms generations, and keeps track of the ranks that currently work together."""

    def __init__(
        self,
        membership: Member,
        held: CommittedState,
        exchange: StateExchange | None,
        *,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        progress: ProgressMeter,
    ) -> None:
        """`exchange`: transfers state between ranks; None under strategies without a process
        group."""
        self.membership = membership
        self.syncing = JoinerState(
            held, exchange, allow_restart=settings.allow_restart_from_scratch
        )
        self.where: Callable[[], Where | None] | None = None
        """Function that returns the script's current position; see `Waiting.where`."""
        self.boundary_due = False
        """True if the last step vote showed that a newer generation is waiting. All ranks enter it
        at the next step boundary."""
        self.stop_due = False
        """True if the last step vote showed that training ends at the next step boundary, on all
        ranks."""
        self.preempted = False
        """True if training ends because all ranks have been asked to leave. In this case, the run
        is unfinished."""
        self._held = held
        self._exchange = exchange
        self._settings = settings
        self._metrics = metrics
        self._progress = progress
        self._learners: tuple[int, ...] = ()
        self.group: Group | None = None
        """The last group that was established, or the group that is about to be established; it may
        have ended. None before the first. Does not show a group whose ranks have met but not
        agreed; see `Member.group`."""
        self._established = False
        """True if the group is established. Sharded state is then distributed across its ranks."""
        self._agreed = False
        """True if the ranks of the membership's group agree on the state, but the group is not yet
        established."""
        self._outcomes_due = 0
        """Number of outcomes that every script must have received, according to the last
        rendezvous."""
        self._rendezvous_began = 0.0
        self._failed_at: float | None = None

    # ---------------------------------------------------------------------------------- who is here

    @property
    def working(self) -> Group | None:
        """Ranks of the group that take steps and run operations together: all except spares. As
        long as some ranks have not received the state, includes all ranks."""
        group, engine = self.group, self._held.attached
        if group is None or engine is None or self._learners:
            return group
        return engine.working(group)

    @property
    def generation(self) -> Generation | None:
        """This process's current generation; None before the first."""
        if self.group is not None:
            return self.group.generation
        return self.membership.link.newest_generation if self._held.phase.holds_state else None

    @property
    def members(self) -> list[str]:
        """Ids of the members of the last established group that have the state. Raises
        MembershipChanged and UnavailableError as `AskedPeers` does."""
        peers = self.group.generation.peers if self.group is not None else ()
        return [peer.member_id for peer in peers if peer.rank not in self._learners]

    def peers_have(self, step: int) -> bool:
        """Returns whether every rank with the state in the last established group is known to have
        committed `step`."""
        return self.group is None or self.membership.all_have(
            self.group.generation, self._learners, step
        )

    @property
    def is_first(self) -> bool:
        """True if this rank is the lowest rank that has the state. It acts on behalf of all ranks,
        because rank 0 may be a joiner without the state."""
        generation = self.generation
        members = (
            (r for r in range(generation.world_size) if r not in self._learners)
            if generation is not None
            else ()
        )
        return generation is None or next(iter(members), generation.rank) == generation.rank

    @property
    def healthy(self) -> bool:
        """True if a group is established and no collective has failed in it."""
        return self._established and self.group is not None and self.group.broken is None

    @property
    def must_move(self) -> bool:
        """True if this rank's script must receive further outcomes before a generation can be
        established. In that case, the next step that the script begins is aborted."""
        return self._held.outcomes < self._outcomes_due

    def channel(self, kind: str) -> GroupChannel:
        """Returns a channel to the members of the group, for one operation.

        Raises:
            MembershipChanged: there is no group.
        """
        return GroupChannel(self.working or self._require_group(), kind, self._learners)

    # ------------------------------------------------------------------------------ new generations

    def failed(self, reason: str) -> None:
        """Aborts the group because a collective of the current step has failed. The measured
        recovery time begins with the first failure. May be called by a collective's callback."""
        self._failed_at = self._failed_at or time.monotonic()
        if self.group is not None:
            self.group.abort(reason)

    def committed(self, *, boundary_due: bool, stop_due: bool, preempted: bool) -> None:
        """Records the requests in a committed step's vote. After a failure, also ends the measured
        recovery time. `boundary_due`: True if a newer generation is waiting. `stop_due`: True if
        training ends. `preempted`: True if all ranks have been asked to leave."""
        self.boundary_due, self.stop_due, self.preempted = boundary_due, stop_due, preempted
        if self._failed_at is not None:
            self._metrics.recovered(time.monotonic() - self._failed_at)
            self._failed_at = None

    def recover(self, error: BaseException, *, in_operation: bool | None = None) -> None:
        """Abandons a failed group and forms a new one. `in_operation`: see `end_group`. Raises the
        same errors as `reform`."""
        self.end_group(error, in_operation=in_operation)
        self.reform()

    def end_group(self, error: BaseException, *, in_operation: bool | None) -> None:
        """Abandons a failed group and reports the failure, so that no peer continues to wait in the
        group. `in_operation`: True in an operation between steps; False in a step; None outside of
        both. Raises MembershipChanged if no further group will be formed."""
        self._failed_at = self._failed_at or time.monotonic()
        self._established = self._agreed = False
        self._held.interrupted = None
        if self.membership.group is not None:
            self.membership.group.abort(str(error))
        if self.group is not None:
            self.group.abort(str(error))
            if in_operation is not None:
                self._held.interrupted = Interrupted(self.group.generation.number, in_operation)
        self.membership.failed(error)

    def settle(self, *, updated: bool = False) -> None:
        """Forms and establishes a group if necessary. Returns when the group is established, or
        when this rank's script must advance first. `updated`: True if sharded state has changed
        since the ranks met. The state must then be consolidated in a new group, even if this rank's
        script must advance first. Raises the same errors as `reform`."""
        if self.healthy or (self.must_move and not updated):
            return
        if self._agreed:
            if not self.establish():
                self.reform()
            return
        group = self.group
        self.recover(
            MembershipChanged(
                group.broken if group is not None and group.broken else "there is no group"
            )
        )

    def went_back(self) -> None:
        """Records that all ranks of the group have replaced a lost state with a checkpoint's state,
        so that the group can be established."""
        group = self.group
        self._agreed = (
            not self._established
            and group is not None
            and group is self.membership.group
            and group.broken is None
        )
        if self._agreed:
            self.boundary_due = False  # this is the generation that the boundary was due for

    def take_newest(self) -> None:
        """Forms the newer generation that was announced by the last step vote, unless it has
        already been formed. Raises the same errors as `reform`."""
        if self.boundary_due:
            self.reform()
        else:
            self.settle()

    def reform(self) -> None:
        """Forms newer generations until one is established, or until this rank's script must
        advance first.

        Raises:
            StopTraining: the job is stopped, or this member must leave.
            DeadlineError: no generation formed within the rendezvous timeout.
            PreconditionError: the state is lost, or this member was evicted.
        """
        while self.rendezvous():
            if self.establish():
                return

    def rendezvous(self) -> bool:
        """Forms newer generations until the ranks of one agree on the state, and returns True. If
        this rank's script must advance first, abandons the group and returns False. Raises the same
        errors as `reform`."""
        # measured from the first failure; the wait for a generation has a separate deadline
        give_up_at: float | None = None
        self._established = self._agreed = False
        while True:
            self._rendezvous_began = time.monotonic()
            try:
                group = self.membership.form()
                if self._exchange is not None:
                    # set before the first exchange, because a receiver may request the state after
                    # it
                    self._exchange.expect(group)
                plan = self._reconcile(group)
                if plan.moving:
                    self._let_move(group, plan)
            except GROUP_LOST as error:
                _log.info("a generation did not form: %s", error)
                self.membership.failed(error)
                give_up_at = (
                    give_up_at
                    or time.monotonic() + self._settings.rendezvous_timeout.total_seconds()
                )
                if time.monotonic() > give_up_at:
                    raise DeadlineError(
                        f"no generation formed within {self._settings.rendezvous_timeout_s:.0f} s "
                        f"(SHOAL_RENDEZVOUS_TIMEOUT_S); the last attempt failed: {error}"
                    ) from error
                continue
            if not plan.moving:
                self._agreed = True
                return True
            unequal = MembershipChanged(
                f"ranks {list(plan.moving)} have to finish a step before a generation can form"
            )
            group.abort(str(unequal))
            self.membership.failed(unequal)
            if group.rank in plan.moving:
                return False

    def establish(self) -> bool:
        """Establishes a group whose ranks have met, and reshards the state for its ranks. Must be
        called on all ranks. Returns False if the group failed while it was being established."""
        held, group = self._held, self.membership.group
        self._agreed = False
        try:
            if group is None or group.broken is not None:
                raise MembershipChanged(
                    group.broken
                    if group is not None and group.broken is not None
                    else "there is no group"
                )
            self._cut_for(group)
        except GROUP_LOST as error:
            _log.info("a generation did not form: %s", error)
            self.membership.failed(error)
            return False
        self._established = True
        group.waiting.where = self.where
        self.boundary_due = False
        held.interrupted = None
        self._progress.entered()
        generation = group.generation
        self._metrics.generation_formed(
            number=generation.number,
            member_id=generation.me.member_id,
            rank=generation.rank,
            world_size=generation.world_size,
            seconds=time.monotonic() - self._rendezvous_began,
        )
        return True

    def _cut_for(self, group: Group) -> None:
        """Reshards the state for the ranks of `group` once all of them have it. If there are
        joiners, which receive the state only at the next step boundary, consolidates the state
        instead. Must be called on all ranks."""
        self.group = group
        held = self._held
        if not self._learners:
            if held.has_engine:
                held.engine.reshard(group)
        elif group.rank not in self._learners:
            lost: StateLostError | None = None
            channel = GroupChannel(group, _BRINGING, self._learners)
            try:
                # With a model on the meta device, no step was taken and nothing is sharded.
                if all(
                    channel.exchange(
                        b"values" if held.has_engine and held.engine.has_values() else b""
                    )
                ):
                    held.engine.consolidate(channel)
                    held.engine.keep_two_copies(channel)
            except StateLostError as error:  # the same on all members
                lost = error
            GroupChannel(group, _TOGETHER, self._learners).exchange(b"")
            if lost is not None:
                raise lost
        elif len(self._learners) < group.world_size:
            follow_as_learner(group, self._learners, _TOGETHER)

    def _let_move(self, group: Group, plan: Reconciliation) -> None:
        """Waits until the ranks whose scripts must advance have received everything they need. The
        caller must not abandon the group before that, because doing so discards data that is still
        being sent."""
        if not plan.committed:
            with contextlib.suppress(StateLostError):
                # the next generation reaches the same decision once all ranks have advanced
                self._consolidate(group)
        try:
            group.exchange(b"")
        except GROUP_LOST:
            if group.rank not in plan.moving:
                raise
            # This rank has everything, and another rank has already left.

    def _consolidate(self, group: Group) -> None:
        """Consolidates the state (`TrainingEngine.consolidate`) of the ranks that agree on it,
        before the group is abandoned because other ranks must first abort a step. Until the next
        group forms, the scripts of the agreeing ranks use this state. Ranks that have updated
        parameters therefore send the values to all ranks that have the same parameters. Must be
        called on all ranks."""
        held = self._held
        step, held.step = held.step, None  # otherwise nothing would be sent and the step would fail
        try:
            if step is not None and step.unresolved:
                step.abort()
                held.engine.discard_step()
            self._cut_for(group)
        finally:
            held.step = step

    def _reconcile(self, group: Group) -> Reconciliation:
        """Exchanges the ranks' status, and transfers results or state if necessary. Returns the
        decision."""
        failpoint("session.before_reconcile")
        held = self._held
        gathered = group.all_gather_integers(held.status().encode())
        assert all(len(row) == RANK_STATUS_LENGTH for row in gathered)
        plan = reconcile([RankStatus.decode(row) for row in gathered])
        if plan.state_lost and not plan.learners:
            raise PreconditionError(
                f"the state {plan.newest} is lost, because an update failed midway on every rank "
                "that had it; restart from a checkpoint"
            )
        if plan.overtaken:
            self._replace_overtaken(group, plan)
        if plan.apart:
            raise operations_apart(
                f"ranks {list(plan.apart)} were in an operation between steps, while others were "
                "in a step"
            )
        if plan.behind or plan.results_from is not None:
            held.interrupted = None
        commit_payload, results = b"", b""
        if plan.committed and plan.donors:
            commit_payload = group.exchange(
                held.commit_payload() if group.rank == plan.donors[0] else b""
            )[plan.donors[0]]
        if plan.behind and plan.donors:
            self._catch_up(group, plan)
        if plan.results_from is not None:
            results = group.exchange(
                held.operations.encode() if group.rank == plan.results_from else b""
            )[plan.results_from]
        # In the following, ranks communicate only in calls that all of them make.
        if group.rank in plan.committed:
            held.decide(commit_payload)
            held.operations.await_results(results)
        elif group.rank in plan.behind:
            held.operations.restart(results, passed=False)
        elif group.rank in plan.results_to:
            held.operations.extend(results)
        if group.rank not in plan.learners:
            if group.rank in plan.behind:
                # its script is in an operation, and has received the same outcomes as the others
                held.outcomes = plan.outcomes
            self._outcomes_due = plan.outcomes
        self._learners = plan.learners
        return plan

    def _replace_overtaken(self, group: Group, plan: Reconciliation) -> NoReturn:
        """Replaces the processes of ranks whose peers took steps without them. Such a rank leaves
        the job and raises PreconditionError. The others raise MembershipChanged and continue in the
        next generation."""
        if group.rank in plan.overtaken:
            assert plan.newest is not None
            self.membership.give_up_place(
                "the other ranks took steps without this rank: it has committed "
                f"{self._held.steps} steps, and they have committed {plan.newest.step}; a "
                "replacement process receives their state"
            )
        raise MembershipChanged(
            f"ranks {list(plan.overtaken)} were unreachable while the others took steps, and are "
            "being replaced"
        )

    def _catch_up(self, group: Group, plan: Reconciliation) -> None:
        held = self._held
        if group.rank in plan.behind:
            state = self._require_exchange().take(group, plan.donors)
            group.exchange(b"")
            held.restore(state)
            held.name = plan.newest
            if plan.newest is not None:
                _log.info(
                    "received the state of step %d, committed in generation %d, from peers",
                    plan.newest.step,
                    plan.newest.generation,
                )
        elif group.rank in plan.donors:
            self._require_exchange().give(group, held.capture(), until=lambda: group.exchange(b""))
        else:
            group.exchange(b"")

    def wait_as_spare(self) -> None:
        """Waits, as a spare, for the next generation, which this rank enters as a joiner. Raises
        the same errors as `reform`."""
        self._held.phase.set_aside()
        self.membership.link.become_spare()
        self._outcomes_due = 0  # the count of outcomes will arrive with the peers' state
        _log.info(
            "there are too few ranks for another replica that includes this rank; this rank is a "
            "spare until the membership changes"
        )
        self._await_more(Drained)

    def await_ranks(self) -> None:
        """Waits for the next generation if there are too few ranks for a replica, although each
        rank has the complete state. Raises the same errors as `reform`."""
        alone = self.group is None or self.group.world_size == 1
        # a rank without peers may want to save the state
        self._await_more(StopTraining if alone else Drained)

    def _await_more(self, drained: type[StopTraining]) -> None:
        """Waits for the next generation. `drained`: exception to raise if this member is asked to
        leave."""
        lines = WaitingLines()
        while True:
            lines.say("more ranks", self._why_spare)
            if self.membership.link.draining is not None:
                raise drained(self.membership.link.draining)
            with contextlib.suppress(DeadlineError):
                self.membership.await_generation(_SPARE_LOOK)
                break
            group = self.group
            if group is not None and group.ended:
                # a peer has failed, or its script has finished: the coordinator knows which
                self.recover(
                    MembershipChanged("a peer left while this rank was waiting for more ranks")
                )
                return
        self.reform()

    def _why_spare(self) -> str:
        engine, group = self._held.engine, self.group
        size, rank = (group.world_size, group.rank) if group is not None else (1, 0)
        left_over = size - engine.replica_size * (size // engine.replica_size)
        text = (
            f"a replica of the model needs {engine.replica_size} ranks; this is rank {rank} of "
            f"{size}"
        )
        if rank >= size - left_over:
            text += (
                f", and {engine.replica_size - left_over} more are needed for a replica that "
                "includes it"
            )
        else:
            text += ", and there are already as many replicas as requested"
        gone = self.membership.last_departures()
        return (
            f"{text}; start more workers. Workers that left last: {', '.join(gone) or 'none known'}"
        )

    # ------------------------------------------------------------------------------ the first state

    def synchronize_first(self) -> None:
        """Sends the first rank's weights to all ranks. Forms the first group if there is none.
        Raises the same errors as `reform`."""
        if self.group is None:
            self.reform()
        while self._held.name is None:
            # if the state has a name, establishing the generation has done what the exchange below
            # does
            group = self._require_group()
            channel = GroupChannel(group, "attach", self._learners)
            try:
                self._equal_weights(group, channel)
                # a rank that completes this exchange knows that all ranks have the weights, and may
                # shard its own
                channel.exchange(b"")
            except GROUP_LOST as error:
                self.recover(error)

    def _equal_weights(self, group: Group, channel: GroupChannel) -> None:
        engine = self._held.engine
        mine = f"{state_digest(engine.capture()):016x}" if engine.has_values() else "meta"
        digests = [d.decode() for d in channel.exchange(mine.encode())]
        if digests[0] == "meta":
            raise ConfigurationError(
                f"the parameters of rank {channel.members[0]}, the first rank, are on the meta "
                "device, but all ranks start from that rank's values; initialize the parameters "
                "there"
            )
        if any(d != digests[0] for d in digests):
            if channel.rank == 0:
                self._require_exchange().give(
                    group, engine.capture(), until=lambda: channel.exchange(b"")
                )
            else:
                state = (
                    self._require_exchange().take(group, [channel.members[0]])
                    if mine != digests[0]
                    else None
                )
                channel.exchange(b"")
                if state is not None:
                    engine.restore(state)
        self._held.begin(group.generation.number, group.generation.nonce)

    def replace_state(self, channel: GroupChannel, captured: object) -> None:
        """Sends the state that the first rank has read from a checkpoint to all ranks. `captured`:
        that state; None on the other ranks. Must be called within an operation."""
        group, held = self._require_group(), self._held
        if channel.rank == 0:
            self._require_exchange().give(group, captured, until=lambda: channel.exchange(b""))
            state: Any = captured
        else:
            state = self._require_exchange().take(group, [channel.members[0]])
            channel.exchange(b"")
        held.restore(state)
        held.name = StateName(group.generation.number, int(state["steps"]))
        held.operations.committed()

    # -------------------------------------------------------------------------------------- joiners

    @property
    def joiners_wait(self) -> bool:
        """True if there are joiners, possibly including this rank, that will receive the state at
        the next step boundary."""
        return bool(self._learners)

    def let_joiners_in(self, place: ScriptPosition) -> ScriptPosition | None:
        """At a step boundary, sends the state to joiners, which become members. `place`: this
        process's position in the script. Returns the peers' position if this process is a joiner
        with peers, otherwise None. Raises the same errors as `reform`."""
        peers_at = None
        while self._learners and not self.must_move:
            group = self._require_group()
            started = time.monotonic()
            try:
                peers_at = self.syncing.sync(group, self._learners, place)
            except GROUP_LOST as error:
                self.recover(error)
            except StateLostError:
                if group.rank not in self._learners:
                    raise
                # The members return to a checkpoint, and reach a boundary like this one again with
                # a complete state.
            else:
                count = len(self._learners)
                self._learners, self._outcomes_due = (), self._held.outcomes
                self._metrics.joined(time.monotonic() - started, count=count)
        return peers_at

    # ----------------------------------------------------------------------------------- invariants

    def _require_group(self) -> Group:
        if self.group is None:
            raise MembershipChanged("there is no group")
        return self.group

    def _require_exchange(self) -> StateExchange:
        assert self._exchange is not None
        return self._exchange
