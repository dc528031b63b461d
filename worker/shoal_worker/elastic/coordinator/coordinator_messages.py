"""Converts messages between a member and the coordinator: protobuf messages to and from Shoal's own
values. Used only by `link.py` and `outbox.py`.

The rest of the package does not use protobuf. Incoming messages are validated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal_common.errors import CorruptDataError, InternalError
from shoal_common.formats import rank_table
from shoal_common.formats.runs import Run
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.contract.generation import AskedPeers, Generation, Peer, Topology
from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.coordinator.hang_report import Neighbour
from shoal_worker.elastic.coordinator.member import LeaveReason
from shoal_worker.elastic.coordinator.progress import Progress

_REASONS = {
    LeaveReason.DRAINED: pb.Leave.REASON_DRAINED,
    LeaveReason.FINISHED: pb.Leave.REASON_FINISHED,
    LeaveReason.FAILED: pb.Leave.REASON_FAILED,
}


def run_message(text: str) -> pb.RunId | None:
    """Parses the run that a launcher assigned to its worker. Returns None if `text` is empty; the
    worker then joins the newest run.

    Raises:
        ConfigurationError: `text` does not have the format written by launchers.
    """
    if not text:
        return None
    run = Run.parse(text, what="SHOAL_RUN")
    return pb.RunId(number=run.number, began_unix_ms=run.began_unix_ms)


Ask = Callable[[int, str, Sequence[int]], list[Peer]]
"""Function that requests ranks of a generation from the coordinator. Its arguments are the
generation's number and nonce, and the ranks; if the ranks are empty, it requests all."""


def parse_generation(
    directive: pb.MemberDirective, mine: Peer, before: Generation | None, ask: Ask
) -> Generation:
    """Parses a generation that the member `mine` has received, and sets that member's rank.
    `before`: the newest generation known so far. `ask`: function that requests details of ranks."""
    message = directive.generation
    return (
        _parse_whole(message, mine.member_id)
        if message.ranks
        else _parse_large(message, directive.rank, mine, before, ask)
    )


def parse_ranks(message: pb.GetRanksResponse) -> list[Peer]:
    """Parses the response to a request for ranks."""
    return [_parse_rank(rank) for rank in message.ranks]


def _parse_rank(message: pb.Rank) -> Peer:
    return Peer(
        rank=message.rank,
        member_id=message.member_id,
        host=message.host,
        donor_address=message.donor_address,
        joining=message.joining,
        donor_key=message.donor_key,
    )


def _parse_large(
    message: pb.Generation, rank: int, mine: Peer, before: Generation | None, ask: Ask
) -> Generation:
    size, number, nonce = message.world_size, message.number, message.nonce
    if not 0 <= rank < size:
        raise InternalError(
            f"generation {number} assigns member {mine.member_id} rank {rank} of {size}; expected "
            "a rank below the size"
        )
    try:
        joining = frozenset(rank_table.of_runs(message.joining, size))
    except CorruptDataError as error:
        raise InternalError(f"generation {number}: {error}") from error
    known = None if before is None or message.change.since != before.number else before.known
    peers = AskedPeers(
        mine=replace(mine, rank=rank, joining=rank in joining),
        size=size,
        joining=joining,
        digest=message.table_digest,
        ask=lambda ranks: ask(number, nonce, ranks),
        follow=None if known is None else lambda: _followed(known, message.change, joining),
    )
    topology = Topology(world_size=size, most_local=message.most_local_ranks)
    return Generation(
        number=number,
        nonce=nonce,
        peers=peers,
        rank=rank,
        interrupts_below=message.interrupts_below,
        sent_topology=topology,
        begins_run=_begins_run(message),
    )


def _followed(table: Sequence[Peer], change: pb.RankChange, joining: frozenset[int]) -> list[Peer]:
    """Applies `change` to a rank table and returns the new table. Raises CorruptDataError if the
    change does not fit the table."""
    peers = rank_table.follow(
        table, change.removed, [(rank.rank, _parse_rank(rank)) for rank in change.added]
    )
    return [
        peer
        if peer.rank == rank and peer.joining == (rank in joining)
        else replace(peer, rank=rank, joining=rank in joining)
        for rank, peer in enumerate(peers)
    ]


def _parse_whole(message: pb.Generation, member_id: str) -> Generation:
    peers = tuple(_parse_rank(rank) for rank in message.ranks)
    mine = [p.rank for p in peers if p.member_id == member_id]
    if len(mine) != 1 or [p.rank for p in peers] != list(range(len(peers))):
        raise InternalError(
            f"generation {message.number} does not assign member {member_id} exactly one of the "
            f"ranks 0 to {len(peers) - 1}"
        )
    return Generation(
        number=message.number,
        nonce=message.nonce,
        peers=peers,
        rank=mine[0],
        interrupts_below=message.interrupts_below,
        begins_run=_begins_run(message),
    )


def _begins_run(message: pb.Generation) -> bool:
    return bool(message.cause == pb.Generation.CAUSE_START)


def leave_message(
    reason: LeaveReason, detail: str, *, alone: bool, steps: int, held: LastState | None = None
) -> pb.Leave:
    """Returns a leave message, with the first 1024 characters of `detail`."""
    message = pb.Leave(reason=_REASONS[reason], detail=detail[:1024], alone=alone, steps=steps)
    if held is not None:
        replicas = pb.Replicas(
            generation=held.generation, step=held.step, agreed=held.agreed, digests=held.digests
        )
        message.replicas.CopyFrom(replicas)
    return message


def observed_message(seen: Neighbour) -> pb.ObservedStacks:
    """Returns the part of a heartbeat that contains another member's stacks."""
    return pb.ObservedStacks(
        member_id=seen.member_id, script_line=seen.script_line, stacks=seen.stacks
    )


def progress_message(progress: Progress) -> pb.Progress:
    """Returns the part of a heartbeat that contains this worker's progress."""
    busy = progress.busy_link
    return pb.Progress(
        step=progress.step,
        steps_in_all=progress.steps_in_all,
        epoch=progress.epoch,
        sequence=progress.sequence,
        samples_per_s=progress.samples_per_s,
        loss=progress.loss,
        step_time_s=progress.step_time_s,
        samples=progress.samples,
        staleness=progress.staleness,
        waiting_s=progress.waiting_s,
        waiting_in=progress.waiting_in,
        busy_time_s=progress.busy_time_s,
        cpu_s=progress.cpu_s,
        server_wait_s=progress.server_wait_s,
        awaited_server=progress.awaited_server,
        script_line=progress.script_line,
        share=progress.share,
        upload_backlog_bytes=progress.upload_backlog_bytes,
        last_wait=progress.last_wait,
        stacks=progress.stacks,
        metrics=progress.metrics,
        busy_link=pb.BusyLink(rank=busy.rank, bytes_per_s=busy.bytes_per_s)
        if busy is not None
        else None,
    )
