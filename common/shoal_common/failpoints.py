"""Named points in the code at which a test can make this process fail:
in workers, parameter servers and the coordinator alike.

`SHOAL_FAILPOINTS` holds `name@hit=action` entries, comma-separated: at the `hit`-th pass (from 1)
through the failpoint `name`, do `action`: `kill` (SIGKILL to this process), `stop` (SIGSTOP: hangs
until someone sends SIGCONT), `hang` (this thread alone, for ever: heartbeats go on), `lose`
(MembershipChanged, as if a peer had gone), `raise` (RuntimeError). Without the variable a failpoint
costs one look-up in a cache.

Workers:

    compression.halfway         the first collectives of all compressed buckets are done on this
                                rank, their second ones are under way
    norms.before_gather         a synchronized norm has this rank's statistics, and the other ranks'
                                are not there
    whole_batch.before_headers  this rank's rows are there, and the others do not know how many
    whole_batch.before_rows     all know how many rows each rank has, and have only their own
    reduction.under_way         this rank has started to sum some of the step's gradients, and waits
                                for none
    reduction.completed         the step's gradients are summed, and it is not prepared on this rank
    sharded.sealed              this rank's part of the summed gradients is with its mirror holder
    step.closed                 the commit all-reduce came back, and this rank has not looked at it
    several_models.updated      one of several models is updated, and the step is not known to count
    several_models.sealed       all that step are updated, or about to be, and this rank has not
                                sent its part of the commit all-reduce
    several_models.closed       the commit all-reduce came back, and this rank has not looked at it
    mesh.dividing               this rank is about to connect the groups along the axes, its parts
                                gathered
    session.before_apply        all collectives of the step are done, nothing is applied on this
                                rank
    session.after_apply         applied, not yet committed: no loader has moved, nobody was told
    session.after_commit        the step is committed on this rank
    session.before_reconcile    the generation's group is connected
    session.in_operation        an operation between steps begins on its channel
    session.after_operation     its result is kept
    session.at_border           the members have met at a step boundary that joiners wait at
    checkpoint.shard_written    this rank's shard of a checkpoint is on the disk, and nobody was
                                told
    rows.written                a bucket of a sparse table is on the disk, in a checkpoint that is
                                not whole
    rows.put                    a server has a bucket of a checkpoint in the place of its own;
                                others have theirs still
    transfer.before_serving     a receiver has asked this donor
    transfer.before_taking      this receiver has not asked yet
    exchange.server_answered    one parameter server has acknowledged the push; others may not have
                                it yet
    exchange.done               all of them have, nothing was recorded, and the coordinator has not
                                heard of it
    tables.summed               this rank has the row gradients of all ranks, and the step is not
                                closed
    tables.met                  all ranks are known to have committed the step, and this one has
                                pushed nothing of its rows
    tables.pushed               this rank has pushed its share of the rows, and has not noted it

Parameter servers:

    journal.before_write        records are about to be written to the journal
    journal.durable             they are on disk, and have had no effect
    journal.effect_made         one of them has had its effect, and nobody was answered
    journal.file_begun          another file of the journal was begun
    snapshot.written            a snapshot is on disk under its temporary name
    snapshot.renamed            it has its name, and the journal before it is still there
    snapshot.spare_kept         the newest file of the journal that it takes the place of is the
                                spare; older ones are still there
    snapshot.journal_shortened  all of them are gone
    pull.halfway                values of a partition have been sent, and the pull goes on
    recovery.begun              the snapshot is read, and nothing of the journal
    recovery.record_made        a record of the journal has been made again
    recovery.done               all have, and no file of the journal was begun
    backup.before_note          a primary's backup has a copy, and the journal is about to say that
                                changes wait for it
    backup.holds                changes wait for the backup, and the coordinator was not told that
                                it is in sync
    backup.cleared              a backup has removed what it had, and nothing of the copy is on its
                                disk
    backup.copied               the copy is on its disk, and the primary was not told
    backup.record_made          a backup has a change on disk and has made it, and the primary was
                                not told
    backup.promoted             a backup was made the primary, and serves nobody yet
    move.frozen                 partitions that are to go to another server are frozen, and nothing
                                of them was sent
    move.taken                  the other server has all of them on disk, and the giver was not told
    move.noted                  the giver's journal has that they are leaving, and the coordinator
                                was not told
    move.reported               the coordinator is being told that they were taken
    move.activated              the other server serves them, by a shard map that is on its disk,
                                and has answered nobody yet
    move.dropped                the giver has dropped them

Coordinator:

    decision.before_write       a change is about to be written to Redis
    decision.written            it is in Redis, and nobody was told
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
"""Guards the counts, since several threads may pass a failpoint at once."""


def failpoint(name: str) -> None:
    """Passes through the failpoint `name`."""
    wanted = _wanted()
    if not wanted:
        return
    with _counting:
        _hits[name] += 1
        hit = _hits[name]
    action = wanted.get((name, hit))
    if action is not None:
        _ACTIONS[action]()
