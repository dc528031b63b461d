"""The places of a job's parameter servers: each has a share of the tensors, a primary, and perhaps
a backup. Who is in a place, and what is told to those."""

from __future__ import annotations

from dataclasses import replace

from shoal_coordinator.membership.draft import Draft
from shoal_coordinator.membership.effects import SendMove, SendPlace, SendSettled
from shoal_coordinator.membership.state import Server, ServerRole


def of_place(draft: Draft, index: int, role: ServerRole) -> Server | None:
    """The server that is a place's primary, or its backup."""
    return next(
        (
            server
            for server in draft.servers.values()
            if server.index == index and server.role is role
        ),
        None,
    )


def primaries(draft: Draft) -> dict[int, Server]:
    """The primary of each place, by the place's index, in order."""
    found = {
        server.index: server
        for server in draft.servers.values()
        if server.role is ServerRole.PRIMARY
    }
    return dict(sorted(found.items()))


def holds_something(draft: Draft, index: int) -> bool:
    """Whether partitions lie with a place, or may: it owns some, or takes part in the move under
    way."""
    if draft.layout is None:
        return False
    move = draft.moves.under_way
    return index in draft.layout.shares or (move is not None and move.concerns(index))


def next_epoch(draft: Draft, index: int) -> None:
    """Begins the place's next epoch: what its primary has to say of the one before does not count
    any more."""
    primary = of_place(draft, index, ServerRole.PRIMARY)
    assert primary is not None, (
        "a backup is one of a primary, which keeps its place until the backup has it"
    )
    draft.put_server(replace(primary, epoch=primary.epoch + 1))


def tell_place(draft: Draft, index: int) -> None:
    """Tells both servers of a place, as far as they are there, what they are; and the primary how
    moves stand."""
    primary, backup = (
        of_place(draft, index, ServerRole.PRIMARY),
        of_place(draft, index, ServerRole.BACKUP),
    )
    assert primary is not None, "a place that has a backup has a primary"
    for server in (primary, backup):
        if server is not None and server.alive:
            draft.effects.append(
                SendPlace(
                    server_id=server.server_id,
                    epoch=primary.epoch,
                    role=server.role,
                    primary_address=primary.address if primary.alive else "",
                    backup_id=backup.server_id if backup is not None and backup.alive else "",
                    in_sync=backup is not None and backup.in_sync,
                )
            )
    tell_settled(draft, primary)
    tell_move(draft, primary)


def tell_settled(draft: Draft, primary: Server) -> None:
    """Tells a primary that is there how far moves are settled."""
    if draft.layout is not None and primary.alive:
        draft.effects.append(
            SendSettled(
                server_id=primary.server_id, move=draft.moves.settled, epoch=draft.layout.epoch
            )
        )


def tell_all_settled(draft: Draft) -> None:
    """Tells each primary that is there how far moves are settled."""
    for primary in primaries(draft).values():
        tell_settled(draft, primary)


def tell_move(draft: Draft, primary: Server) -> None:
    """Tells a primary that is there of the move under way, if it is the giver."""
    move = draft.moves.under_way
    if move is None or move.giver != primary.index or not primary.alive:
        return
    receiver = of_place(draft, move.receiver, ServerRole.PRIMARY)
    address = receiver.address if receiver is not None and receiver.alive else ""
    draft.effects.append(SendMove(server_id=primary.server_id, move=move, receiver_address=address))
