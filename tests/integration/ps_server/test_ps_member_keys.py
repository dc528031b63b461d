"""A member can act only for itself: a client with a worker's token but without the member's key can
neither push nor pull as that member."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from shoal_common.bulk.transport import Transport
from shoal_common.errors import PermissionDeniedError

KEYS = {"a": "a" * 32, "b": "b" * 32}

over_each_transport = pytest.mark.parametrize(
    "transport", [Transport.GRPC, Transport.TCP, Transport.MEMORY]
)


def client_of(cluster: Any, name: str | None, transport: Transport = Transport.GRPC) -> Any:
    return cluster.client(
        cluster.running,
        transport=transport,
        token="wt",
        member_key=None if name is None else KEYS[name],
    )


@pytest.fixture
def guarded(cluster: Any, tmp_path: Any) -> Any:
    """A server that requires tokens, with members a and b, each of which has a key."""
    tokens = tmp_path / "tokens"
    tokens.write_text("worker: wt\nreader: rt\n")
    cluster.declare()
    cluster.coordinator.members(1, "a", "b", keys=KEYS)
    cluster.unregistered(tokens=tokens, token="st")
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    return cluster


@over_each_transport
def test_member_pushes_and_pulls_only_with_its_own_key(guarded: Any, transport: Transport) -> None:
    own = guarded.member(client_of(guarded, "a", transport))
    guarded.trainable(own.client)
    own.push(1.0)
    for other in ("b", None):
        thief = guarded.member(client_of(guarded, other, transport))
        for call in (partial(thief.push, 1.0), thief.pull):
            with pytest.raises(PermissionDeniedError) as refused:
                call()
            assert refused.value.reason == "MEMBER_KEY_WRONG"
    assert all(result.version == 3 for result in own.push(1.0)), "nothing of the others was applied"
    assert len(guarded.member(client_of(guarded, None, transport)).pull(member_id="")) == 3, (
        "who looks on needs none"
    )


def test_every_call_that_names_a_member_requires_its_key(guarded: Any) -> None:
    own, thief = client_of(guarded, "a"), client_of(guarded, "b")
    guarded.trainable(own)
    calls = {
        "Initialize": lambda client: guarded.member(client).initialize(np.float32(1.0)),
        "Push": lambda client: guarded.member(client).push(1.0),
        "Pull": lambda client: guarded.member(client).pull(),
        "OpenData": lambda client: client.open_data("job", "a"),
        "AdvanceClock": lambda client: client.advance_clock("job", "a", clock=5),
        "AdvanceClock of a generation": lambda client: client.advance_clock(
            "job", "a", clock=6, generation=1
        ),
    }
    for name, call in calls.items():
        with pytest.raises(PermissionDeniedError) as refused:
            call(thief)
        assert refused.value.reason == "MEMBER_KEY_WRONG", name
        call(own)


def test_ticket_issued_before_the_server_knew_the_member_does_not_authorize_it(
    guarded: Any,
) -> None:
    """The thief requests a connection in the name of a member that has not joined yet."""
    owner = guarded.member(client_of(guarded, "a"))
    guarded.trainable(owner.client)
    early = guarded.client(
        guarded.running, transport=Transport.TCP, token="wt", member_key=KEYS["b"]
    )
    thief = guarded.member(early, "c", generation=2)
    ticket = early.open_data("job", "c")
    assert ticket.ticket
    guarded.coordinator.members(2, "a", "b", "c", keys={**KEYS, "c": "c" * 32})
    with pytest.raises(PermissionDeniedError) as refused:
        thief.push(1.0)
    assert refused.value.reason == "MEMBER_KEY_WRONG"


def test_restarted_server_knows_the_keys_while_the_coordinator_is_away(
    guarded: Any, tmp_path: Any
) -> None:
    cluster = guarded
    cluster.running.stop()
    settings = {"tokens": tmp_path / "tokens", "token": "st", "data_dir": tmp_path / "data"}
    cluster.unregistered(**settings)
    cluster.coordinator.registrations.get(timeout=30)
    cluster.coordinator.heartbeats.get(timeout=30)
    cluster.trainable(client_of(cluster, "a")).push(1.0)
    cluster.running.stop()
    cluster.coordinator.stop()
    cluster.unregistered(**settings)
    with pytest.raises(PermissionDeniedError) as refused:
        cluster.member(client_of(cluster, "b")).push(1.0)
    assert refused.value.reason == "MEMBER_KEY_WRONG"
    assert cluster.member(client_of(cluster, "a")).push(1.0, sequence=2)


def test_members_without_a_key_are_trusted(cluster: Any) -> None:
    """Members of an earlier release have no key, and the server trusts the ids that they send."""
    cluster.trainable(cluster.server()).push(1.0)
