"""Open streams of one job. Carries out the core's decisions: converts effects to messages and puts
them into the streams' mailboxes.

The streams belong to the event loop. A message for many recipients is serialized once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal_common.errors import PreconditionError, ShoalError
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership.model.effects import (
    AnnounceGeneration,
    Effect,
    EndServerSession,
    EndSession,
    SendDrain,
    SendGeneration,
    SendMembers,
    SendMove,
    SendNotice,
    SendPlace,
    SendSettled,
    SendStandby,
    SendStop,
    StopServer,
    StopServers,
)
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import Generation
from shoal_coordinator.service.mailbox import Mailbox, Slot
from shoal_coordinator.service.messages.responses import (
    announcement,
    move_message,
    notice_message,
    place_message,
    ranks_message,
)


class Sessions:
    """Mailboxes of open streams: at most one for each member and each server."""

    def __init__(self) -> None:
        self.members: dict[str, Mailbox] = {}
        self.servers: dict[str, Mailbox] = {}
        self._announced: tuple[Generation, Callable[[int], bytes]] | None = None
        """The last announced generation, and the function that serializes its announcement for a
        rank."""
        self._table: tuple[Generation, bytes] | None = None
        """The last generation whose full table was requested, and the serialized table."""

    def attach_member(self, member_id: str, mailbox: Mailbox) -> None:
        """Registers the open stream of a member. Closes an older stream of the member."""
        _replace(self.members, member_id, mailbox)

    def attach_server(self, server_id: str, mailbox: Mailbox) -> None:
        """Registers the open stream of a server. Closes an older stream of the server."""
        _replace(self.servers, server_id, mailbox)

    def detach_member(self, member_id: str, mailbox: Mailbox) -> bool:
        """Unregisters a closed stream. Returns False if the member has a newer stream."""
        return _remove(self.members, member_id, mailbox)

    def detach_server(self, server_id: str, mailbox: Mailbox) -> bool:
        """Unregisters a closed stream. Returns False if the server has a newer stream."""
        return _remove(self.servers, server_id, mailbox)

    def end_all(self, error: ShoalError) -> None:
        """Closes the streams of all members and servers with `error`."""
        for mailbox in (*self.members.values(), *self.servers.values()):
            mailbox.end(error)

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Carries out effects in order. Recipients without a stream are notified when they
        reconnect."""
        for effect in effects:
            match effect:
                case AnnounceGeneration(generation=generation):
                    announced = self._announcement(generation)
                    for position, rank in enumerate(generation.ranks):
                        self._send(rank.member_id, Slot.PLACEMENT, announced(position))
                case SendGeneration(generation=generation):
                    message = self._announcement(generation)(generation.rank_of[effect.member_id])
                    self._send(effect.member_id, Slot.PLACEMENT, message)
                case SendStandby():
                    message = pb.MemberDirective(
                        standby=pb.Standby(reason=effect.reason, apart_from=effect.apart_from)
                    ).SerializeToString()
                    self._send(effect.member_id, Slot.PLACEMENT, message)
                case SendNotice(generation=generation):
                    message = pb.MemberDirective(notice=notice_message(effect)).SerializeToString()
                    for rank in generation.ranks:
                        self._send(rank.member_id, Slot.NOTICE, message)
                case SendDrain():
                    message = pb.MemberDirective(
                        drain=pb.Drain(reason=effect.reason)
                    ).SerializeToString()
                    self._send(effect.member_id, Slot.DRAIN, message)
                case SendStop():
                    message = pb.MemberDirective(
                        stop=pb.Stop(
                            reason=effect.reason,
                            now=effect.now,
                            behind=effect.behind,
                            finished_steps=effect.finished_steps,
                        )
                    ).SerializeToString()
                    self._send(effect.member_id, Slot.STOP, message)
                case EndSession():
                    mailbox = self.members.pop(effect.member_id, None)
                    if mailbox is not None:
                        mailbox.end(effect.error)
                case EndServerSession():
                    mailbox = self.servers.pop(effect.server_id, None)
                    if mailbox is not None:
                        mailbox.end(effect.error)
                case SendMembers():
                    self._send_to_servers(effect)
                case SendPlace():
                    self._send_to_server(effect.server_id, Slot.PLACE, place_message(effect))
                case SendSettled():
                    settled = pb.MovesSettled(move=effect.move, epoch=effect.epoch)
                    self._send_to_server(
                        effect.server_id, Slot.SETTLED, pb.ServerDirective(settled=settled)
                    )
                case SendMove():
                    self._send_to_server(effect.server_id, Slot.MOVE, move_message(effect))
                case StopServer():
                    self._send_to_server(
                        effect.server_id,
                        Slot.STOP,
                        pb.ServerDirective(stop=pb.Stop(reason=effect.reason)),
                    )
                case StopServers():
                    message = pb.ServerDirective(
                        stop=pb.Stop(reason=effect.reason)
                    ).SerializeToString()
                    for mailbox in self.servers.values():
                        mailbox.post(Slot.STOP, message)

    def whole_table(self, generation: Generation) -> bytes:
        """Returns the serialized GetRanks response with all ranks of a generation."""
        if self._table is None or self._table[0] is not generation:
            self._table = (
                generation,
                ranks_message(generation, range(len(generation.ranks))).SerializeToString(),
            )
        return self._table[1]

    def _announcement(self, generation: Generation) -> Callable[[int], bytes]:
        if self._announced is None or self._announced[0] is not generation:
            self._announced = (generation, announcement(generation))
        return self._announced[1]

    def _send(self, member_id: str, slot: Slot, message: bytes) -> None:
        mailbox = self.members.get(member_id)
        if mailbox is not None:
            mailbox.post(slot, message)

    def _send_to_server(self, server_id: str, slot: Slot, directive: pb.ServerDirective) -> None:
        mailbox = self.servers.get(server_id)
        if mailbox is not None:
            mailbox.post(slot, directive.SerializeToString())

    def _send_to_servers(self, effect: SendMembers) -> None:
        receivers = [
            name
            for name in (self.servers if effect.server_id is None else [effect.server_id])
            if name in self.servers
        ]
        if not receivers:
            return
        digests = [bytes.fromhex(digest) for digest in effect.key_digests]
        members = pb.Members(
            generation=effect.generation, member_ids=effect.member_ids, key_digests=digests
        )
        message = pb.ServerDirective(members=members).SerializeToString()
        for server_id in receivers:
            self.servers[server_id].post(Slot.MEMBERS, message)


def _replace(mailboxes: dict[str, Mailbox], name: str, mailbox: Mailbox) -> None:
    older = mailboxes.get(name)
    if older is not None:
        older.end(
            PreconditionError(f"{name} opened a newer session", reason=Refusal.SESSION_REPLACED)
        )
    mailboxes[name] = mailbox


def _remove(mailboxes: dict[str, Mailbox], name: str, mailbox: Mailbox) -> bool:
    if mailboxes.get(name) is not mailbox:
        return False
    del mailboxes[name]
    return True
