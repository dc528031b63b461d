"""State over TCP: whole, checksummed, from several donors, and never from a stranger."""

import threading
from datetime import timedelta

import pytest
import torch
from shoal_common.errors import CorruptDataError, UnavailableError
from shoal_worker.elastic import transfer
from shoal_worker.elastic.transfer import StateDonor, take_state

NONCE = "0123456789abcdef0123456789abcdef"
TIMEOUT = timedelta(seconds=10)


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


def test_a_receiver_may_come_before_the_offer() -> None:
    donor = StateDonor("127.0.0.1")
    answers: list[object] = []
    receiver = threading.Thread(target=lambda: answers.append(take_state([donor.address], NONCE, timeout=TIMEOUT)))
    receiver.start()
    with donor.offering({"x": torch.ones(3)}, NONCE):
        receiver.join(10)
    donor.close()
    assert len(answers) == 1


def test_a_wrong_nonce_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_IO_TIMEOUT_S", 0.2)
    donor = StateDonor("127.0.0.1")
    with donor.offering(state(), NONCE), pytest.raises(UnavailableError, match="went away"):
        take_state([donor.address], "f" * 32, timeout=TIMEOUT)
    donor.close()


def test_a_damaged_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = StateDonor("127.0.0.1")
    honest = transfer._digest
    monkeypatch.setattr(transfer, "_digest", lambda data: honest(data) if len(data) < 1000 else b"\0" * 8)
    # The donor sends the false checksum; only the receiver's own view is honest.
    monkeypatch.setattr(
        transfer,
        "_check",
        lambda data, checksum, address, what: (
            (_ for _ in ()).throw(CorruptDataError("wrong")) if honest(memoryview(data)) != bytes(checksum) else None
        ),
    )
    with donor.offering(state(), NONCE), pytest.raises(CorruptDataError):
        take_state([donor.address], NONCE, timeout=TIMEOUT)
    donor.close()


def test_donors_that_differ_are_not_mixed() -> None:
    first, second = StateDonor("127.0.0.1"), StateDonor("127.0.0.1")
    with first.offering({"x": torch.zeros(3_000_000)}, NONCE), second.offering({"x": torch.ones(3_000_000)}, NONCE):
        taken, _ = take_state([first.address, second.address], NONCE, timeout=TIMEOUT)
    first.close()
    second.close()
    assert torch.equal(taken["x"], torch.zeros(3_000_000))


def test_a_donor_that_is_gone_is_named() -> None:
    donor = StateDonor("127.0.0.1")
    address = donor.address
    donor.close()
    with pytest.raises(UnavailableError, match=address):
        take_state([address], NONCE, timeout=TIMEOUT)


def _offers(servers: list[StateDonor], offered: object):
    import contextlib

    stack = contextlib.ExitStack()
    for server in servers:
        stack.enter_context(server.offering(offered, NONCE))
    return stack
