"""State transfer over TCP: checksums protect the state, it comes from several donors, and it is
never sent to or received from strangers."""

import contextlib
import json
import os
import queue
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from shoal_common.errors import CorruptDataError, UnavailableError
from shoal_common.security.certificates import PairContexts
from shoal_common.settings import parse_address
from shoal_worker.elastic.coordinator.stall_watch import unreachable
from shoal_worker.elastic.group import transfer
from shoal_worker.elastic.group.transfer import (
    MOST_DONORS,
    StateDonor,
    share_of,
    shut_down,
    take_state,
)

from tests.relay import BACK, Relay
from tests.zygote.children import eventually

NONCE = "0123456789abcdef0123456789abcdef"
TIMEOUT = timedelta(seconds=60)


def state() -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "weights": torch.randn(1500, 1000),
        "half": torch.randn(7).to(torch.bfloat16),
        "step": 3,
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0),
    }


@pytest.mark.parametrize("donors", [1, 2, 3])
def test_a_state_arrives_bit_for_bit_from_any_number_of_donors(donors: int) -> None:
    offered = state()
    servers = [StateDonor("127.0.0.1") for _ in range(donors)]
    try:
        with _offers(servers, offered):
            taken, size = take_state([s.address for s in servers], NONCE, timeout=TIMEOUT)
    finally:
        for s in servers:
            s.close()
    assert size == sum(t.nbytes for t in offered.values() if isinstance(t, torch.Tensor))
    assert taken["step"] == 3
    for name in ("weights", "half", "scalar", "none"):
        assert torch.equal(taken[name], offered[name])
        assert taken[name].dtype == offered[name].dtype


def test_an_ipv6_donor_reports_an_address_that_peers_and_the_coordinator_can_read() -> None:
    donor = StateDonor("::1")
    assert parse_address(donor.address).host == "::1"
    with donor.offering({"x": 1}, NONCE):
        assert take_state([donor.address], NONCE, timeout=TIMEOUT)[0] == {"x": 1}
    assert unreachable({1: donor.address}, timeout=TIMEOUT, given_up=lambda: False) == []
    donor.close()


def test_receivers_distribute_their_requests_over_the_donors() -> None:
    assert share_of((2,), receiver=7) == (2,)
    assert sorted(share_of((0, 1, 3), receiver=2)) == [0, 1, 3]
    donors = range(100, 100 + 3 * MOST_DONORS)
    asked = [share_of(donors, receiver=receiver) for receiver in range(3)]
    assert sorted(donor for each in asked for donor in each) == list(donors)


def test_receiver_may_arrive_before_the_offer() -> None:
    donor = StateDonor("127.0.0.1")
    answers: list[object] = []
    receiver = threading.Thread(
        target=lambda: answers.append(take_state([donor.address], NONCE, timeout=TIMEOUT))
    )
    receiver.start()
    with donor.offering({"x": torch.ones(3)}, NONCE):
        receiver.join(60)
    donor.close()
    assert len(answers) == 1


def test_wrong_nonce_receives_nothing() -> None:
    donor = StateDonor("127.0.0.1")
    donor.expect(NONCE)
    with donor.offering(state(), NONCE), pytest.raises(UnavailableError, match="lost donor"):
        take_state([donor.address], "f" * 32, timeout=TIMEOUT)
    donor.close()


def test_damaged_block_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = StateDonor("127.0.0.1")
    honest = transfer._digest
    monkeypatch.setattr(
        transfer, "_digest", lambda data: honest(data) if len(data) < 1000 else b"\0" * 8
    )
    # The donor sends a wrong checksum; only the receiver computes it correctly.
    monkeypatch.setattr(
        transfer,
        "_check",
        lambda data, checksum, address, what: (
            (_ for _ in ()).throw(CorruptDataError("wrong"))
            if honest(memoryview(data)) != bytes(checksum)
            else None
        ),
    )
    with donor.offering(state(), NONCE), pytest.raises(CorruptDataError):
        take_state([donor.address], NONCE, timeout=TIMEOUT)
    donor.close()


def test_donors_with_different_states_are_not_mixed(caplog: pytest.LogCaptureFixture) -> None:
    zeros, ones = {"x": torch.zeros(3_000_000)}, {"x": torch.ones(3_000_000)}
    assert torch.equal(taken_from(zeros, ones, zeros)["x"], zeros["x"])
    assert "ranks that should have the same state offer different states" in caplog.text


def test_device_digest_is_not_compared_with_a_host_digest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest computed on a device is not compared with digests computed on the host, so a mixture
    of donors causes no warning about different states."""
    same = {"x": torch.arange(3_000_000.0)}
    made = transfer._encode_header

    def on_a_device(structure: Any, tensors: dict[str, torch.Tensor]) -> bytes:
        header = json.loads(made(structure, tensors))
        return json.dumps(header | {"digest": "0" * 16, "places": "cuda"}).encode()

    encoders = iter([made, on_a_device, made])

    def encode(structure: Any, tensors: dict[str, torch.Tensor], _: Any) -> bytes:
        return next(encoders)(structure, tensors)

    served, send = [], transfer._send_part

    def send_part(connection: socket.socket, offer: Any, part: int, parts: int) -> None:
        served.append((part, parts))
        send(connection, offer, part, parts)

    monkeypatch.setattr(transfer, "_encode_header", encode)
    monkeypatch.setattr(transfer, "_send_part", send_part)
    assert torch.equal(taken_from(same, same, same)["x"], same["x"])
    assert "offer different states" not in caplog.text
    assert sorted(part for part in served if part[1] == 2) == [(0, 2), (1, 2)]


def taken_from(*states: Any) -> Any:
    """Returns the state received from donors that each offer one of `states`."""
    with contextlib.ExitStack() as stack:
        donors = []
        for each in states:
            donors.append(StateDonor("127.0.0.1"))
            stack.callback(donors[-1].close)
            stack.enter_context(donors[-1].offering(each, NONCE))
        return take_state([donor.address for donor in donors], NONCE, timeout=TIMEOUT)[0]


def test_peers_receive_the_reachable_address_instead_of_the_listening_one() -> None:
    donor = StateDonor("0.0.0.0", announced="203.0.113.7")
    host, _, port = donor.address.rpartition(":")
    assert host == "203.0.113.7"
    with donor.offering(state(), NONCE):
        assert set(take_state([f"127.0.0.1:{port}"], NONCE, timeout=TIMEOUT)[0]) == set(state())
    donor.close()


def test_unreachable_donor_is_named_with_the_flag_for_its_address() -> None:
    donor = StateDonor("127.0.0.1")
    address = donor.address
    donor.close()
    with pytest.raises(
        UnavailableError,
        match=rf"{address} .*start its launcher with --local-addr \(SHOAL_LOCAL_ADDR\)",
    ):
        take_state([address], NONCE, timeout=TIMEOUT)


def connect(donor: StateDonor) -> socket.socket:
    host, _, port = donor.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request() -> bytes:
    return transfer._MAGIC + transfer._REQUEST.pack(NONCE.encode(), 0, 1)


@pytest.fixture
def donor() -> Iterator[StateDonor]:
    donor = StateDonor("127.0.0.1")
    yield donor
    donor.close()


def test_hanging_receiver_does_not_block_the_donor(donor: StateDonor) -> None:
    with connect(donor) as hung:
        with donor.offering({"x": torch.zeros(16 << 20)}, NONCE):
            hung.sendall(request())
            assert hung.recv(1)  # it is being served and reads no more
            started = time.monotonic()
        assert time.monotonic() - started < 20.0  # a single block may take 30 s


def test_a_stranger_is_turned_away_at_its_first_bytes(donor: StateDonor) -> None:
    with donor.offering(state(), NONCE), connect(donor) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        assert _is_closed(stranger)


def test_silent_client_is_rejected_soon(donor: StateDonor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_REQUEST_TIMEOUT_S", 0.1)
    with connect(donor) as silent, connect(donor) as trickling:
        trickling.sendall(transfer._MAGIC)
        assert _is_closed(silent)
        assert _is_closed(trickling)


def test_connections_beyond_the_limit_wait_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(transfer, "_MOST_CONNECTIONS", 8)
    donor = StateDonor("127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.callback(donor.close)
        idle = [stack.enter_context(connect(donor)) for _ in range(24)]
        with donor.offering({"x": torch.ones(3)}, NONCE):
            taken, _ = take_state([donor.address], NONCE, timeout=TIMEOUT)
        assert sum(thread.name == "shoal-donate" for thread in threading.enumerate()) <= 8
        assert all(_is_closed(connection) for connection in idle)
    assert torch.equal(taken["x"], torch.ones(3))


def test_a_donor_outlives_a_lack_of_descriptors(
    donor: StateDonor, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting:
        host, _, port = donor.address.rpartition(":")
        lowest = os.dup(waiting.fileno())  # the lowest free descriptor
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            waiting.connect((host, int(port)))
            eventually(
                lambda: "Too many open files" in caplog.text, "the donor to lack descriptors"
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with donor.offering({"x": torch.ones(3)}, NONCE):
        taken, _ = take_state([donor.address], NONCE, timeout=TIMEOUT)
    assert torch.equal(taken["x"], torch.ones(3))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [{"name": "x", "dtype": "Tensor", "shape": [3]}]},
        {"tensors": [{"name": "x", "dtype": "load", "shape": [3]}]},
        {"tensors": [{"name": "x", "dtype": "float32", "shape": [-3]}]},
        {"tensors": [{"name": "x", "dtype": "float32", "shape": "3"}]},
        {"tensors": 3},
        {"structure": {"!": "no such kind"}, "tensors": []},
    ],
)
def test_bytes_that_do_not_describe_a_state_are_corrupt_data(
    donor: StateDonor, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    honest = transfer._encode_header
    monkeypatch.setattr(
        transfer,
        "_encode_header",
        lambda *state: json.dumps(json.loads(honest(*state)) | change).encode(),
    )
    with donor.offering({"x": torch.ones(3)}, NONCE), pytest.raises(CorruptDataError):
        take_state([donor.address], NONCE, timeout=TIMEOUT)


def test_donor_that_is_too_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_BLOCK_TIMEOUT_S", 0.3)
    header = transfer._encode_header({"x": {"!": "tensor", "name": "x"}}, {"x": torch.ones(1000)})
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def serve() -> None:
            connection, _ = slow.accept()
            with connection, contextlib.suppress(OSError):  # the receiver has given up
                connection.sendall(
                    transfer._U64.pack(len(header)) + header + transfer._digest(header)
                )
                while True:  # a byte now and then, so that no single read times out
                    connection.sendall(b"x")
                    time.sleep(0.05)  # not a wait: this is the donor's slowness

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(UnavailableError, match="timed out"):
                take_state([f"127.0.0.1:{slow.getsockname()[1]}"], NONCE, timeout=TIMEOUT)
        finally:
            thread.join(60)


def test_guard_of_a_transfer_can_end_it(donor: StateDonor) -> None:
    """A receiver that waits for a donor without an offer is ended by the owner of its guard."""
    guarded: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def end() -> None:
        guarded.get(timeout=60).shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(UnavailableError, match="lost donor"):
        take_state([donor.address], NONCE, timeout=timedelta(seconds=60), guard=guarded.put)
    thread.join(60)
    donor.expect("0" * 32)  # frees the donor's thread as well


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(60)
    with contextlib.suppress(ConnectionResetError):  # the guard has shut it down
        return connection.recv(1) == b""
    return True


def _offers(servers: list[StateDonor], offered: object):
    stack = contextlib.ExitStack()
    for server in servers:
        stack.enter_context(server.offering(offered, NONCE))
    return stack


# ----------------------------------------------------------------------------------------- over TLS


@pytest.fixture
def secure() -> Iterator[StateDonor]:
    """A donor that requires TLS."""
    donor = StateDonor("127.0.0.1", secure=True)
    yield donor
    donor.close()


@pytest.mark.parametrize("donors", [1, 3])
def test_state_arrives_bit_for_bit_over_tls(donors: int) -> None:
    offered = state()
    servers = [StateDonor("127.0.0.1", secure=True) for _ in range(donors)]
    try:
        with _offers(servers, offered):
            taken, _ = take_state(
                [s.address for s in servers], NONCE, timeout=TIMEOUT, keys=[s.key for s in servers]
            )
    finally:
        for s in servers:
            s.close()
    assert torch.equal(taken["weights"], offered["weights"])
    assert taken["step"] == 3


@pytest.mark.parametrize("over_tls", [False, True])
def test_neither_the_nonce_nor_the_state_is_readable_on_the_wire_over_tls(over_tls: bool) -> None:
    secret, seen = b"what nobody else may read", bytearray()
    donor = StateDonor("127.0.0.1", secure=over_tls)
    offered = {"x": torch.frombuffer(bytearray(secret), dtype=torch.uint8)}
    with (
        contextlib.closing(donor),
        Relay(donor.address, tap=seen.extend) as relay,
        donor.offering(offered, NONCE),
    ):
        taken, _ = take_state(
            [relay.address], NONCE, timeout=TIMEOUT, keys=[donor.key] if over_tls else []
        )
    assert bytes(taken["x"].numpy()) == secret
    assert (secret in seen, NONCE.encode() in seen) == (not over_tls, not over_tls)


@pytest.mark.parametrize("key", [None, "0" * 32], ids=["in plain text", "for another key"])
def test_receiver_without_tls_or_at_another_donor_receives_nothing(
    secure: StateDonor, key: str | None
) -> None:
    with secure.offering({"x": 1}, NONCE), pytest.raises(UnavailableError, match="lost donor"):
        take_state(
            [secure.address],
            NONCE,
            timeout=timedelta(seconds=10),
            keys=[] if key is None else [key],
        )


def test_stranger_with_the_key_and_without_the_nonce_receives_nothing_over_tls(
    secure: StateDonor,
) -> None:
    secure.expect(NONCE)
    with secure.offering({"x": 1}, NONCE), pytest.raises(UnavailableError):
        take_state([secure.address], "f" * 32, timeout=TIMEOUT, keys=[secure.key])


def test_closing_offer_ends_its_transfers_over_tls(secure: StateDonor) -> None:
    marker, seen, under_way = b"marker of the state, often", bytearray(), threading.Event()
    large = torch.frombuffer(bytearray(marker * (2 << 20)), dtype=torch.uint8)

    def tap(data: bytes) -> None:
        seen.extend(data)
        if len(seen) > 1 << 20 and not under_way.is_set():
            relay.hold((BACK,))
            under_way.set()

    failures: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take() -> None:
        try:
            take_state([relay.address], NONCE, timeout=TIMEOUT, keys=[secure.key])
        except UnavailableError as error:
            failures.put(str(error))

    with Relay(secure.address, tap=tap) as relay:
        thread = threading.Thread(target=take)
        with secure.offering({"x": large}, NONCE):
            thread.start()
            assert under_way.wait(60)
        relay.open()
        assert "lost donor" in failures.get(timeout=60)
        thread.join(60)
    assert marker not in seen


def test_connection_that_is_shut_down_stays_a_tls_connection() -> None:
    """A TLS connection that is shut down stays a TLS connection, so a concurrent sender fails
    instead of sending plain text, as after SSLSocket's own method."""
    here, there = socket.socketpair()
    listening = threading.Thread(
        target=lambda: channels.put(PairContexts.listener("k").wrap_socket(there, server_side=True))
    )
    channels: queue.SimpleQueue[ssl.SSLSocket] = queue.SimpleQueue()
    listening.start()
    with PairContexts.caller().wrap_socket(here), channels.get(timeout=60) as channel:
        shut_down(channel)
        assert channel.version() == "TLSv1.3"
        with pytest.raises(OSError, match=r"EOF|[Pp]ipe|closed"):
            channel.sendall(b"x" * 100)
    listening.join(60)
