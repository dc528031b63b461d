"""State on a device is copied while training continues, sent to a joiner, and compared. The device
is a stand-in."""

from __future__ import annotations

import re
import threading
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import UnavailableError
from shoal_worker.checkpoint.files import read_checkpoint
from shoal_worker.elastic.group.transfer import StateDonor, take_state
from shoal_worker.state import device_reader, digest
from shoal_worker.state.device_reader import DeviceReader, HostCopies, bytes_in, keep_fitting
from shoal_worker.state.digest import digest_of, mixed_sum, state_digest
from shoal_worker.state.tree import Snapshot
from torch import nn

from tests.fake_device.lanes import LateLane
from tests.zygote.children import eventually

NONCE = "0123456789abcdef0123456789abcdef"
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    """Puts all tensors on a simulated device and yields the lane from it."""
    one = LateLane()
    monkeypatch.setattr(device_reader, "lane_of", lambda device: one)
    return one


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weights": torch.randn(1500, 1000),
        "across": torch.randn(30, 20).t(),
        "half": torch.randn(7).to(torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "count": torch.tensor(3),
        "none": torch.empty(0),
        "flags": torch.tensor([True, False]),
    }


# --- copies


def test_memory_that_does_not_fit_is_freed_before_the_first_copy() -> None:
    live = {"kept": torch.ones(10), "smaller": torch.ones(5), "other": torch.ones(7)}
    memory = Snapshot.take(live).host_tensors
    freed = {name: weakref.ref(tensor) for name, tensor in memory.items()}
    left = keep_fitting(memory, {"kept": torch.ones(2, 5), "smaller": torch.ones(4)})
    assert set(left) == {"kept"}
    assert {name for name, tensor in freed.items() if tensor() is not None} == {"kept"}


def test_copy_made_in_inference_mode_can_be_reused_outside_it() -> None:
    live = state()
    with torch.inference_mode():
        memory = Snapshot.take(live).host_tensors
    assert state_digest(Snapshot.take(live, memory=memory).state()) == state_digest(live)


def test_a_forked_process_does_not_share_the_pages_of_a_copy() -> None:
    """A shared page would be duplicated by the next copy. The flag "dc" is described in proc(5)."""
    copy = Snapshot.take({"large": torch.ones(1 << 20)}).tensors["large"]
    address = copy.data_ptr()
    flags: list[str] = []
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = line.split()
    assert "dc" in flags


@pytest.mark.parametrize("on_device", [False, True])
def test_a_snapshot_uses_the_memory_of_an_earlier_one(
    on_device: bool, request: pytest.FixtureRequest
) -> None:
    if on_device:
        request.getfixturevalue("lane")
    live = state()
    earlier = Snapshot.take(live)
    memory = {name: tensor.data_ptr() for name, tensor in earlier.tensors.items()}
    live["weights"] += 1
    live["across"] = torch.randn(600)  # a different shape, but as many elements
    live["half"] = torch.ones(8, dtype=torch.bfloat16)
    live["count"] = torch.tensor(4.0)  # a different dtype
    later = Snapshot.take(live, memory=earlier.host_tensors)
    assert state_digest(later.state()) == state_digest(live)
    assert {name for name, at in memory.items() if later.tensors[name].data_ptr() != at} == {
        "half",
        "count",
    }


def test_snapshot_has_the_values_at_its_start_though_it_arrives_later(
    lane: LateLane,
) -> None:
    live = state()
    before = state_digest(live)
    snapshot = Snapshot.take(live)
    assert lane.sent == 0  # nothing has been waited for
    for tensor in live.values():
        tensor.zero_()
    assert state_digest(snapshot.state()) == before
    assert lane.sent == snapshot.nbytes
    assert all(
        tensor.is_contiguous() and not tensor.is_conj() for tensor in snapshot.tensors.values()
    )
    assert lane.sent == snapshot.nbytes  # the snapshot is copied once


def test_data_that_a_device_has_no_room_to_copy_is_awaited() -> None:
    lane = LateLane(room=1000)
    copies = HostCopies(lambda device: lane)
    small, large = torch.arange(100.0), torch.arange(200.0)
    copied = [copies.of(small), copies.of(large)]
    copies.begun()
    assert lane.sent == large.nbytes
    small.zero_()
    large.zero_()
    copies.arrive()
    assert [each[-1].item() for each in copied] == [99, 199]


def test_device_with_fragmented_memory_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = LateLane()
    copies, tensor = HostCopies(lambda device: lane), torch.arange(100.0)

    def full(*arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", full)
        copy = copies.of(tensor)
    copies.begun()
    assert lane.sent == tensor.nbytes
    assert torch.equal(copy, tensor)


def test_two_threads_that_wait_for_copies_both_receive_them(lane: LateLane) -> None:
    live = {str(number): torch.full((1000,), float(number)) for number in range(50)}
    snapshot, found = Snapshot.take(live), []
    threads = [
        threading.Thread(target=lambda: found.append(state_digest(snapshot.state())))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [state_digest(live)] * 2


def test_blocks_follow_each_other_through_two_buffers() -> None:
    lane = LateLane()
    lane.computed = True
    pieces = [torch.arange(each, dtype=torch.int64) for each in (1, 0, 100, 17)]
    came = [
        block.clone() for block in DeviceReader(lane, block_bytes=56).blocks(map(bytes_in, pieces))
    ]
    assert torch.equal(torch.cat(came), torch.cat([bytes_in(each) for each in pieces]))
    assert [len(block) for block in came] == [8, *[56] * 14, 16, 56, 56, 24]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_checkpoint_has_the_values_of_its_step_though_training_continues_while_it_arrives(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(directory: Path) -> None:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        model, optimizer = shoal.as_distributed(
            net, torch.optim.Adam(net.parameters()), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.randn(48, 8), torch.arange(48) % 4),
            global_batch_size=8,
        )
        for number, (x, y) in enumerate(loader):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                shoal.save_checkpoint(directory)

    shoal.launch(train, tmp_path / "host", world_size=2)

    def made(device: torch.device) -> LateLane:
        one = LateLane()
        lanes.append(one)
        return one

    lanes: list[LateLane] = []
    monkeypatch.setattr(device_reader, "lane_of", made)
    shoal.launch(train, tmp_path / "device", world_size=2)
    assert sum(each.sent for each in lanes) > 0
    host, device = (read_checkpoint(tmp_path / each / "step-3") for each in ("host", "device"))
    assert state_digest(host.state["model"]) == state_digest(device.state["model"])
    assert state_digest(host.state["optimizer"]) == state_digest(device.state["optimizer"])


def test_device_failure_during_a_copy_is_reported_by_the_waiting_thread(lane: LateLane) -> None:
    snapshot = Snapshot.take(state())
    lane.failed = True
    with pytest.raises(RuntimeError, match="launch failure"):
        snapshot.state()


# --- transfers


@pytest.mark.parametrize("donors", [1, 3])
def test_state_is_sent_from_a_device_block_by_block(donors: int, lane: LateLane) -> None:
    offered = state()
    servers = [StateDonor("127.0.0.1") for _ in range(donors)]
    offers = [server.offering(offered, NONCE) for server in servers]
    for offer in offers:
        offer.__enter__()
    taken, size = take_state([server.address for server in servers], NONCE, timeout=TIMEOUT)
    for offer, server in zip(offers, servers, strict=True):
        offer.__exit__(None, None, None)
        server.close()
    assert state_digest(taken) == state_digest(offered)
    assert lane.sent == size


def test_a_donor_whose_device_fails_sends_nothing_and_the_receiver_is_informed(
    lane: LateLane, caplog: pytest.LogCaptureFixture
) -> None:
    donor = StateDonor("127.0.0.1")
    with donor.offering(state(), NONCE):
        lane.failed = True
        with pytest.raises(UnavailableError, match=r"lost donor .* while it was sending its state"):
            take_state([donor.address], NONCE, timeout=TIMEOUT)
    donor.close()
    eventually(
        lambda: "could not be read from the device: CUDA error" in caplog.text,
        lambda: f"a line in the log: {caplog.text!r}",
    )


# --- digests


def test_device_sum_detects_one_flipped_bit_and_two_swapped_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "_CHUNK", 64)
    for tensor in (
        *{**state(), "weights": torch.randn(3, 1000)}.values(),
        torch.arange(1000, dtype=torch.int16),
        torch.zeros(130, dtype=torch.uint8),
    ):
        sum_of = int(mixed_sum(tensor))
        assert int(mixed_sum(tensor)) == sum_of  # which leaves the tensor unchanged
        if tensor.numel() < 2:
            continue
        flat = tensor.resolve_conj().contiguous().view(-1).clone()
        flipped = flat.clone()
        bytes_in(flipped)[-1] ^= 1
        assert int(mixed_sum(flipped)) != sum_of
        exchanged = flat.clone()
        exchanged[0], exchanged[-1] = flat[-1], flat[0]
        assert torch.equal(exchanged, flat) == (int(mixed_sum(exchanged)) == sum_of)


def test_sums_of_zeros_differ_by_length() -> None:
    sums = {int(mixed_sum(torch.zeros(length))) for length in range(1, 50)}
    assert len(sums) == 49


def test_ranks_compare_one_number_per_device_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "_is_far", lambda tensor: tensor.dim() > 0)
    monkeypatch.setattr(
        digest,
        "bytes_of",
        lambda tensor: (
            memoryview(b"x")
            if tensor.dim() == 0
            else pytest.fail("the tensor was copied to the host")
        ),
    )
    one, other = (
        [torch.arange(10.0), torch.tensor(1), torch.ones(3)],
        [torch.arange(10.0), torch.tensor(1), torch.ones(3)],
    )
    assert digest_of(one) == digest_of(other)
    other[2][1] = 1.5
    assert digest_of(one) != digest_of(other)
