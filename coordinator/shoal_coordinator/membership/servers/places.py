"""Finds and notifies the servers of a place. A place is a share of the tensors, with a primary
server and possibly a backup."""

from __future__ import annotations

from dataclasses import replace

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import SendMove, SendPlace, SendSettled
from shoal_coordinator.membership.model.state import Server, ServerRole


def of_place(draft: Draft, index: int, role: ServerRole) -> Server | None:
    """Returns the server that has `role` (primary or backup) in a place; None if there is none."""
    return next(
        (
            server
            for server in draft.servers.values()
            if server.index == index and server.role is role
        ),
        None,
    )


def primaries(draft: Draft) -> dict[int, Server]:
    """Returns the primary of each place by index, in ascending order."""
    found = {
        server.index: server
        for server in draft.servers.values()
        if server.role is ServerRole.PRIMARY
    }
    return dict(sorted(found.items()))


def holds_something(draft: Draft, index: int) -> bool:
    """Returns whether a place owns partitions, or may have some because it takes part in the
    current move of partitions."""
    if draft.layout is None:
        return False
    move = draft.moves.under_way
    return index in draft.layout.shares or (move is not None and move.concerns(index))


def next_epoch(draft: Draft, index: int) -> None:
    """Begins the next epoch of a place. From then on, the primary's reports about the previous
    epoch are ignored."""
    primary = of_place(draft, index, ServerRole.PRIMARY)
    assert primary is not None, "a place with a backup has a primary until the backup is promoted"
    draft.put_server(replace(primary, epoch=primary.epoch + 1))


def send_place(draft: Draft, index: int) -> None:
    """Sends the connected servers of a place their roles, and sends its primary the state of the
    moves."""
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
    send_settled(draft, primary)
    send_move(draft, primary)


def send_settled(draft: Draft, primary: Server) -> None:
    """Sends a primary the number of the last move that has ended, if the primary is connected."""
    if draft.layout is not None and primary.alive:
        draft.effects.append(
            SendSettled(
                server_id=primary.server_id, move=draft.moves.settled, epoch=draft.layout.epoch
            )
        )


def send_all_settled(draft: Draft) -> None:
    """Sends each connected primary the number of the last move that has ended."""
    for primary in primaries(draft).values():
        send_settled(draft, primary)


def send_move(draft: Draft, primary: Server) -> None:
    """Sends the current move to a primary, if the primary is connected and is the giver."""
    move = draft.moves.under_way
    if move is None or move.giver != primary.index or not primary.alive:
        return
    receiver = of_place(draft, move.receiver, ServerRole.PRIMARY)
    address = receiver.address if receiver is not None and receiver.alive else ""
    draft.effects.append(SendMove(server_id=primary.server_id, move=move, receiver_address=address))
