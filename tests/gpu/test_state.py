"""State on a CUDA device (make test-gpu). tests/unit/worker_state/test_device_reader.py has the
tests on a stand-in."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from shoal_worker.elastic.group.transfer import StateDonor, take_state
from shoal_worker.sharding.mirrors import PinnedMemory
from shoal_worker.state import device_reader
from shoal_worker.state.digest import digest_of, mixed_sum, state_digest
from shoal_worker.state.tree import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

NONCE = "0123456789abcdef0123456789abcdef"


def state() -> dict[str, torch.Tensor]:
    """Returns some hundred megabytes in dtypes of all widths."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    wide = torch.randn(4000, 10_000, generator=draw, device="cuda")
    return {
        "float": wide,
        "half": wide[:100].to(torch.bfloat16),
        "double": wide[:10].double(),
        "across": wide[:30].t(),
        "count": torch.tensor(3, device="cuda"),
        "host": torch.arange(10),
    }


def test_snapshot_keeps_its_values_while_the_device_continues() -> None:
    live = state()
    expected = state_digest(live)
    snapshot = Snapshot.take(live)
    for tensor in live.values():
        tensor.zero_()
    assert state_digest(snapshot.state()) == expected


def test_snapshot_without_room_on_the_device_keeps_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_reader.CudaLane, "room", lambda lane: 0)
    test_snapshot_keeps_its_values_while_the_device_continues()


def test_state_is_sent_from_the_device() -> None:
    offered, donor = state(), StateDonor("127.0.0.1")
    with donor.offering(offered, NONCE):
        taken, _ = take_state([donor.address], NONCE, timeout=timedelta(seconds=60))
    donor.close()
    assert state_digest(taken) == state_digest(offered)


def test_mirrors_move_to_host_memory_and_back() -> None:
    memory = PinnedMemory(torch.device("cuda", torch.cuda.current_device()))
    (tensor, *_) = state().values()
    expected = state_digest([tensor])
    piece = torch.nn.Parameter(tensor)
    for _ in range(3):
        piece.data = memory.put(piece.data)
        assert memory.holds(piece.data)
        assert piece.is_pinned()
        piece.data = memory.bring(piece.data)
        assert not memory.holds(piece.data)
    assert state_digest([piece.data]) == expected


def test_digests_on_the_device_equal_those_on_the_host() -> None:
    for tensor in state().values():
        assert int(mixed_sum(tensor)) == int(mixed_sum(tensor.cpu()))
    assert digest_of(state().values()) == digest_of(state().values())
