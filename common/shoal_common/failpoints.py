"""Named points in the code of workers, parameter servers and the coordinator at which a test can
make the process fail.

`SHOAL_FAILPOINTS` contains `name@hit=action` entries, comma-separated: at the `hit`-th pass (from
1) through the failpoint `name`, the process performs `action`. Actions are `kill` (SIGKILL to this
process), `stop` (SIGSTOP: hangs until someone sends SIGCONT), `hang` (blocks this thread forever;
heartbeats continue), `lose` (raises MembershipChanged, as if a peer had been lost) and `raise`
(raises RuntimeError). If the variable is not set, a failpoint costs one look-up in a cache.

Workers:

    compression.halfway         the first collectives of all compressed buckets are complete on
                                this rank, the second ones are in progress
    norms.before_gather         a synchronized norm has computed this rank's statistics, but has not
                                gathered the statistics of the other ranks
    whole_batch.before_headers  this rank has its rows, but the other ranks do not know how many
    whole_batch.before_rows     every rank knows how many rows each rank has, but has only its own
    reduction.under_way         this rank has started some of the step's all-reduces, but has not
                                waited for any of them
    reduction.completed         the step's gradients are summed, but the step is not prepared on
                                this rank
    sharded.prepared            this rank has sent its part of the summed gradients to its mirror
                                holder
    step.summed                 the commit all-reduce has returned, but this rank has not read the
                                result
    several_models.updated      one of several models is updated, but its step may still be aborted
    several_models.prepared     all models that take part in the step have been updated or are about
                                to be updated, but this rank has not contributed to the commit
                                all-reduce
    several_models.summed       the commit all-reduce has returned, but this rank has not read the
                                result
    mesh.dividing               this rank has gathered its parts and is about to connect the groups
                                along the axes
    session.before_apply        all collectives of the step are complete, but nothing has been
                                applied on this rank
    session.after_apply         the step is applied but not committed: no loader has advanced, and
                                no other component has been notified
    session.after_commit        the step is committed on this rank
    session.before_reconcile    the generation's group is connected
    session.in_operation        an operation between steps is about to start on its channel
    session.after_operation     the result of an operation is stored
    session.at_boundary         all members have reached a step boundary at which joiners are
                                waiting
    checkpoint.shard_written    this rank's shard of a checkpoint is on disk, but the file that
                                describes it is not
    checkpoint.upload_file      a file of a checkpoint is about to be uploaded to an object store
    checkpoint.upload_manifest  all files of a checkpoint except its manifest are in the object
                                store
    rows.written                a bucket of a sparse table is on disk, in an incomplete checkpoint
    rows.put                    a server has replaced a bucket with its contents in a checkpoint;
                                other buckets may still be unchanged
    transfer.before_serving     a donor has received a request, but has not sent anything
    transfer.before_request     a receiver has not sent its request yet
    exchange.server_answered    one parameter server has acknowledged the push; others may not have
                                it yet
    exchange.done               all servers have acknowledged the push, but this worker has not
                                recorded it, and the coordinator has not been notified
    tables.summed               this rank has the row gradients of all ranks, but the step is not
                                committed
    tables.met                  this rank knows that all ranks have committed the step, but has not
                                pushed any of its rows
    tables.pushed               this rank has pushed its part of the rows, but has not recorded it

Parameter servers:

    journal.before_write        records are about to be written to the journal
    journal.durable             the records are on disk, but none has been applied
    journal.effect_made         one of the records has been applied, but no caller has received a
                                response
    journal.file_begun          a new file of the journal has been started
    snapshot.written            a snapshot is on disk under its temporary name
    snapshot.renamed            the snapshot has its final name, but the older journal still exists
    snapshot.spare_kept         the newest journal file that the snapshot replaces is kept as the
                                spare; older files still exist
    snapshot.journal_shortened  all journal files that the snapshot replaces have been removed
    pull.halfway                values of a partition have been sent, and the pull continues
    recovery.begun              a recovery is about to replay the first record of the journal
    recovery.record_made        a record of the journal has been replayed
    recovery.done               all records have been replayed, but no new journal file has been
                                started
    backup.before_note          a backup has a copy of its primary's state, and the primary's
                                journal is about to record that changes wait for the backup
    backup.holds                changes wait for the backup, but the coordinator has not been
                                notified that the backup is in sync
    backup.cleared              a backup has removed its old data, but no part of the new copy is on
                                its disk
    backup.copied               the copy is on the backup's disk, but the primary has not been
                                notified
    backup.record_made          a backup has written and applied a change, but the primary has not
                                been notified
    backup.promoted             a backup has been made the primary, but has not served a call yet
    move.frozen                 partitions that are to move to a different server are frozen, but
                                none of their data has been sent
    move.taken                  the receiver has all partitions on disk, but the giver has not been
                                notified
    move.noted                  the giver's journal records that the partitions are leaving, but the
                                coordinator has not been notified
    move.reported               the giver has queued its report to the coordinator
    move.activated              the receiver serves the partitions according to a shard map that is
                                on its disk, but has not responded to a call yet
    move.dropped                the giver has dropped the partitions

Coordinator:

    decision.before_write       a change is about to be written to Redis
    decision.written            the change is in Redis, but no member has been notified
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from shoal_common.errors import ConfigurationError, MembershipChanged

_ACTIONS: Final[dict[str, Callable[[], object]]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": threading.Event().wait,
    "lose": lambda: _raise(
        MembershipChanged("a failpoint simulated the loss of the process group")
    ),
    "raise": lambda: _raise(RuntimeError("a failpoint raised this error")),
}


def _raise(error: Exception) -> None:
    raise error


def _parse(text: str) -> dict[tuple[str, int], str]:
    wanted: dict[tuple[str, int], str] = {}
    for entry in filter(None, text.split(",")):
        place, _, action = entry.partition("=")
        name, _, hit = place.partition("@")
        if action not in _ACTIONS or not hit.isdigit():
            raise ConfigurationError(
                f"SHOAL_FAILPOINTS: {entry!r}: expected name@hit=action with one of the actions "
                f"{', '.join(_ACTIONS)}"
            )
        wanted[name, int(hit)] = action
    return wanted


@functools.cache
def _wanted() -> dict[tuple[str, int], str]:
    return _parse(os.environ.get("SHOAL_FAILPOINTS", ""))


_hits: Counter[str] = Counter()
_counting: Final = threading.Lock()
"""Lock for the counts, since several threads may reach a failpoint at the same time."""


def failpoint(name: str) -> None:
    """Marks a place in the code at which tests can inject failures. Performs the action that
    SHOAL_FAILPOINTS defines for this pass through `name`, if any."""
    wanted = _wanted()
    if not wanted:
        return
    with _counting:
        _hits[name] += 1
        hit = _hits[name]
    action = wanted.get((name, hit))
    if action is not None:
        _ACTIONS[action]()
