"""What a member and the coordinator tell each other, between protobuf and Shoal's own values. `link.py` alone uses it.

The rest of the package knows no protobuf: what comes in is checked here, where it is read.
"""

from __future__ import annotations

from shoal_common.errors import InternalError
from shoal_common.runs import Run
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.generation import Generation, Peer
from shoal_worker.elastic.member import LeaveReason
from shoal_worker.elastic.progress import Progress

_REASONS = {
    LeaveReason.DRAINED: pb.Leave.REASON_DRAINED,
    LeaveReason.FINISHED: pb.Leave.REASON_FINISHED,
    LeaveReason.FAILED: pb.Leave.REASON_FAILED,
}


def run_message(told: str) -> pb.RunId | None:
    """The run that a launcher named to its worker; None: none, so it is the newest.

    Raises:
        ConfigurationError: it is not written as launchers write it.
    """
    if not told:
        return None
    run = Run.parse(told, what="SHOAL_RUN")
    return pb.RunId(number=run.number, began_unix_ms=run.began_unix_ms)


def parse_generation(message: pb.Generation, member_id: str) -> Generation:
    """Reads a generation, from the point of view of the member `member_id`.

    Raises:
        InternalError: the generation does not hold this member: the coordinator only sends a generation to its members.
    """
    peers = tuple(
        Peer(
            rank=r.rank,
            member_id=r.member_id,
            host=r.host,
            donor_address=r.donor_address,
            joining=r.joining,
            donor_key=r.donor_key,
        )
        for r in message.ranks
    )
    mine = [p.rank for p in peers if p.member_id == member_id]
    if len(mine) != 1 or [p.rank for p in peers] != list(range(len(peers))):
        raise InternalError(f"generation {message.number} does not give member {member_id} one rank among {len(peers)} dense ones")
    return Generation(number=message.number, nonce=message.nonce, peers=peers, rank=mine[0], interrupts_below=message.interrupts_below)


def leave_message(reason: LeaveReason, detail: str, *, alone: bool, steps: int) -> pb.Leave:
    """Writes a goodbye; of `detail` the first 1024 characters."""
    return pb.Leave(reason=_REASONS[reason], detail=detail[:1024], alone=alone, steps=steps)


def progress_message(progress: Progress) -> pb.Progress:
    """Writes what a heartbeat carries."""
    busy = progress.busy_link
    return pb.Progress(
        step=progress.step,
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
        busy_link=pb.BusyLink(rank=busy.rank, bytes_per_s=busy.bytes_per_s) if busy is not None else None,
    )
