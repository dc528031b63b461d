"""Rules about leased batches: checks a member's request and applies it to the working copies of the
job's leases (batches.py)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_common.errors import InvalidRequestError, LimitError

from shoal_coordinator.membership.members.joining import live_member
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.events import BatchesLeased
from shoal_coordinator.membership.model.reasons import Refusal


@dataclass(frozen=True, kw_only=True)
class Leased:
    """Outcome of a BatchesLeased event."""

    batches: tuple[int, ...]
    epoch_done: bool
    retry_after_ms: int
    newest_epoch: int
    first_key: int


def batches_leased(draft: Draft, event: BatchesLeased) -> Leased:
    """Applies a member's request: acknowledges finished batches and leases more, first come, first
    served. A request for zero batches ends the member's leases, unless the member asks to keep them
    (`event.keep`)."""
    live_member(draft, event.member_id)
    epochs = draft.epochs_of(event.loader)
    newest = max(epochs, default=0)
    if epochs and event.epoch not in epochs and event.epoch < newest:
        return Leased(
            batches=(), epoch_done=True, retry_after_ms=0, newest_epoch=newest, first_key=0
        )
    if event.want == 0 and (event.epoch not in epochs or event.batches_in_epoch == 0):
        return Leased(
            batches=(), epoch_done=False, retry_after_ms=0, newest_epoch=newest, first_key=0
        )
    if not epochs and draft.count_loaders() >= draft.policy.most_loaders:
        raise LimitError(
            f"job {draft.spec.job_id} already has {draft.policy.most_loaders} loaders with leased "
            "batches, the maximum; use fewer loaders",
            reason=Refusal.LOADERS_LIMIT,
        )
    if event.epoch not in epochs:
        draft.open_epoch(event.loader, event.epoch, event.batches_in_epoch)
    ledger = draft.ledger(event.loader, event.epoch)
    if ledger.batches != event.batches_in_epoch:
        raise InvalidRequestError(
            f"batches_in_epoch={event.batches_in_epoch}, but epoch {event.epoch} of loader "
            f"{event.loader!r} has {ledger.batches}; all members must use the same dataset, batch "
            "size and inner_steps",
            reason=Refusal.BATCHES_CONFLICT,
        )
    repeated = ledger.repeated(event.member_id, event.sequence) if event.sequence else None
    if repeated is not None and event.sequence < repeated.sequence:
        raise InvalidRequestError(
            f"sequence={event.sequence}: expected at least {repeated.sequence}, which member "
            f"{event.member_id} has already sent"
        )
    held = ledger.held(event.member_id, without=event.finished)
    if repeated is None and held + event.want > draft.policy.most_batches:
        raise LimitError(
            f"want={event.want}: member {event.member_id} already has {held} batches of epoch "
            f"{event.epoch} of loader {event.loader!r}, and may have at most "
            f"{draft.policy.most_batches}; report the finished ones",
            reason=Refusal.BATCHES_LIMIT,
        )
    ledger.finish(event.member_id, event.finished)
    members = 1 if draft.generation is None else max(1, len(draft.generation.ranks))
    ledger.keeps_pace(event.member_id, event.batch_ms)
    if repeated is None:
        # the lost response may already have leased a returned batch to this member again
        ledger.take_back(event.member_id, event.returned if event.want or event.keep else None)
    batches = (
        repeated.batches
        if repeated is not None
        else ledger.lease(event.member_id, event.want, event.sequence, members=members)
    )
    done = ledger.is_done
    newest = max(newest, event.epoch)
    wait = event.want > 0 and not batches and not done
    return Leased(
        batches=batches,
        epoch_done=done,
        retry_after_ms=draft.policy.batches_retry_after_ms + members if wait else 0,
        newest_epoch=newest,
        first_key=ledger.first_key,
    )
