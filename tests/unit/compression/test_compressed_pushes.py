"""Pushes to parameter servers: decoded without torch, and nothing is left out for good."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_common import codecs
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.compression import compressor_names, parse_compression
from shoal_worker.compression.pushes import CompressedPushes

CODABLE = [name for name in compressor_names() if name != "powersgd"]
LENGTH = 3001


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


def applied(push: tuple[int, memoryview]) -> torch.Tensor:
    """What a server makes of it."""
    out = np.empty(LENGTH, np.float32)
    codecs.decode(*push, out)
    return torch.from_numpy(out)


def pushes(name: str, stream: int = 1) -> CompressedPushes:
    compressor = parse_compression(name)
    assert compressor is not None
    return CompressedPushes(compressor, stream=stream)


@pytest.mark.parametrize("name", CODABLE)
def test_what_a_server_applies_and_what_is_owed_add_up_to_the_gradients(name):
    worker, served, given = pushes(name), torch.zeros(LENGTH), torch.zeros(LENGTH)
    for sequence in range(1, 5):
        served += applied(worker.encode(gradient(sequence), partition=7, sequence=sequence))
        given += gradient(sequence)
        worker.acknowledged(7)
    owed = worker.state_dict().get("7/residual", torch.zeros(LENGTH))
    torch.testing.assert_close(served + owed, given, rtol=0, atol=1e-5 if worker.compressor.error_feedback else 0.2)
    assert bool(worker.state_dict()) is worker.compressor.error_feedback


@pytest.mark.parametrize("name", CODABLE)
def test_a_refused_push_never_was_and_state_goes_on_bit_for_bit(name):
    worker = pushes(name)
    worker.encode(gradient(1), partition=0, sequence=1)
    worker.acknowledged(0)
    restored = pushes(name)
    restored.load_state_dict(worker.state_dict())
    worker.encode(gradient(9), partition=0, sequence=2)
    worker.refused(0)
    assert bytes(worker.encode(gradient(2), partition=0, sequence=2)[1]) == bytes(restored.encode(gradient(2), partition=0, sequence=2)[1])


@pytest.mark.parametrize("name", CODABLE)
def test_what_has_no_gradient_in_a_step_keeps_what_it_is_owed(name):
    worker, places = pushes(name), ((100, 1600), (2000, 3001))
    worker.encode(gradient(1), partition=7, sequence=1)
    worker.acknowledged(7)
    before = {slot: owed.clone() for slot, owed in worker.state_dict().items()}
    part = torch.cat([gradient(2)[begin:end] for begin, end in places])
    push = worker.encode(part, partition=7, sequence=2, places=places, length=LENGTH)
    worker.acknowledged(7)
    out = np.empty(part.numel(), np.float32)
    codecs.decode(*push, out)
    if not worker.compressor.error_feedback:
        assert torch.allclose(torch.from_numpy(out), part, atol=0.1)
        return
    owed, was = worker.state_dict()["7/residual"], before["7/residual"]
    for begin, end in ((0, 100), (1600, 2000)):
        assert torch.equal(owed[begin:end], was[begin:end])
    of_part = [torch.cat([whole[begin:end] for begin, end in places]) for whole in (owed, was)]
    torch.testing.assert_close(torch.from_numpy(out) + of_part[0], part + of_part[1], rtol=0, atol=1e-5)


def test_partitions_keep_apart_and_workers_round_differently():
    worker, other = pushes("int8"), pushes("int8", stream=2)
    one, two = (worker.encode(gradient(1), partition=partition, sequence=1)[1] for partition in (0, 1))
    assert bytes(one) != bytes(two)
    assert bytes(one) != bytes(other.encode(gradient(1), partition=0, sequence=1)[1])


def test_a_push_that_was_not_answered_blocks_the_next():
    worker = pushes("topk")
    worker.encode(gradient(1), partition=0, sequence=1)
    with pytest.raises(PreconditionError, match="partition 0 was pushed and not answered"):
        worker.encode(gradient(2), partition=0, sequence=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_other_dtypes_are_encoded_as_float32(dtype):
    given = gradient(1).to(dtype)
    torch.testing.assert_close(applied(pushes("bf16").encode(given, partition=0, sequence=1)), given.float(), rtol=2**-8, atol=0)
    assert torch.equal(given, gradient(1).to(dtype))


def test_what_servers_cannot_decode_is_refused():
    with pytest.raises(ConfigurationError, match="'powersgd' is not for parameter servers"):
        pushes("powersgd")
    with pytest.raises(ConfigurationError, match="expected floating-point and one dimension"):
        pushes("int8").encode(torch.zeros(3, 4), partition=0, sequence=1)
