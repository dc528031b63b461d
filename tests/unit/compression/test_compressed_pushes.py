"""Compressed pushes to parameter servers: they are decoded without torch, and no part of a gradient
is lost for good."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker.compression import compressor_names, parse_compression
from shoal_worker.compression.powersgd import PowerSGDCompressor
from shoal_worker.compression.pushes import CompressedPushes

NAMES = compressor_names()
SHAPES = {0: (40, 60), 1: (1, 121), 2: (24, 20)}
"""Shapes of a partition's pieces."""
LENGTH = 3001


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


def encoded(worker: CompressedPushes, seed: int, *, sequence: int = 0) -> tuple[int, memoryview]:
    return worker.encode(gradient(seed), partition=7, sequence=sequence or seed, shapes=SHAPES)


def served(
    push: tuple[int, memoryview], shapes: Mapping[int, tuple[int, int]] = SHAPES
) -> torch.Tensor:
    """Returns the gradient that a server decodes."""
    out = np.empty(sum(rows * columns for rows, columns in shapes.values()), np.float32)
    codecs.decode(*push, out, tuple(shapes.values()))
    return torch.from_numpy(out)


def pushes(name: str, stream: int = 1) -> CompressedPushes:
    compressor = parse_compression(name)
    assert compressor is not None
    return CompressedPushes(compressor, stream=stream)


def owed(worker: CompressedPushes) -> torch.Tensor:
    found = worker.owed(7)
    return torch.zeros(LENGTH) if found is None else found.clone()


@pytest.mark.parametrize("name", NAMES)
def test_applied_and_residual_parts_add_up_to_the_gradients(name):
    worker, applied, given = pushes(name), torch.zeros(LENGTH), torch.zeros(LENGTH)
    for sequence in range(1, 5):
        applied += served(encoded(worker, sequence))
        given += gradient(sequence)
        worker.settle(7, applied=True)
    torch.testing.assert_close(
        applied + owed(worker),
        given,
        rtol=0,
        atol=1e-5 if worker.compressor.error_feedback else 0.2,
    )
    assert (worker.owed(7) is not None) is worker.compressor.error_feedback


@pytest.mark.parametrize("name", [name for name in NAMES if pushes(name).compressor.error_feedback])
def test_residual_is_bitwise_the_part_that_the_server_did_not_apply(name):
    worker = pushes(name)
    for sequence in (1, 2, 3):
        before = owed(worker)
        applied = served(encoded(worker, sequence))
        worker.settle(7, applied=True)
        assert torch.equal(owed(worker), (gradient(sequence) + before) - applied)


@pytest.mark.parametrize("name", NAMES)
def test_unapplied_push_leaves_no_trace(name):
    worker, other = pushes(name), pushes(name)
    for each in (worker, other):
        encoded(each, 1)
        each.settle(7, applied=True)
    encoded(worker, 9, sequence=2)
    worker.settle(7, applied=False)
    for sequence in (2, 3):  # first with the residual, then also with powersgd's initial factors
        one, two = (encoded(each, sequence) for each in (worker, other))
        assert bytes(one[1]) == bytes(two[1])
        for each in (worker, other):
            each.settle(7, applied=True)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_a_gradient_in_a_step_keep_their_residual(name):
    worker, places = pushes(name), ((0, 2400), (2521, 3001))
    shapes = {number: SHAPES[number] for number in (0, 2)}
    encoded(worker, 1)
    worker.settle(7, applied=True)
    was = owed(worker)
    part = torch.cat([gradient(2)[begin:end] for begin, end in places])
    out = served(
        worker.encode(part, partition=7, sequence=2, places=places, length=LENGTH, shapes=shapes),
        shapes,
    )
    worker.settle(7, applied=True)
    if not worker.compressor.error_feedback:
        assert torch.allclose(out, part, atol=0.1)
        return
    is_owed = owed(worker)
    assert torch.equal(is_owed[2400:2521], was[2400:2521])
    of_part = [torch.cat([whole[begin:end] for begin, end in places]) for whole in (is_owed, was)]
    torch.testing.assert_close(out + of_part[0], part + of_part[1], rtol=0, atol=1e-5)


def test_powersgd_pushes_continue_from_the_last_factors_even_of_absent_pieces():
    """Without error feedback, pushes of a constant gradient approach the best approximation of
    their rank, even for a piece that is absent in some steps."""
    compressor = PowerSGDCompressor(rank=2, error_feedback=False)
    worker, shapes = CompressedPushes(compressor, stream=1), {0: (40, 60), 1: (50, 40)}
    whole = torch.randn(4400, generator=torch.Generator().manual_seed(3))
    matrix = whole[2400:].view(50, 40)
    best = float(torch.linalg.svdvals(matrix)[2:].norm())

    def error() -> float:
        push = worker.encode(whole, partition=7, sequence=1, shapes=shapes)
        worker.settle(7, applied=True)
        return float((served(push, shapes)[2400:].view(50, 40) - matrix).norm())

    first = error()
    for _ in range(40):
        error()
    close = error()
    assert best * 0.999 < close < best * 1.01 < first
    worker.encode(
        whole[:2400],
        partition=7,
        sequence=2,
        places=((0, 2400),),
        length=4400,
        shapes={0: (40, 60)},
    )
    worker.settle(7, applied=True)
    assert error() <= close * 1.0001


def test_powersgd_pushes_send_factors_of_matrices_and_the_rest_unchanged():
    worker = CompressedPushes(PowerSGDCompressor(rank=2), stream=1)
    push = encoded(worker, 1)
    assert push[0] == pb.CODEC_POWERSGD
    assert push[1].nbytes == codecs.powersgd_bytes(tuple(SHAPES.values()), (2, 0, 2))
    assert torch.equal(served(push)[2400:2521], gradient(1)[2400:2521])


def test_partitions_are_independent_and_workers_round_differently():
    worker, other = pushes("int8"), pushes("int8", stream=2)
    one, two = (
        worker.encode(gradient(1), partition=partition, sequence=1)[1] for partition in (0, 1)
    )
    assert bytes(one) != bytes(two)
    assert bytes(one) != bytes(other.encode(gradient(1), partition=0, sequence=1)[1])


def test_unanswered_push_blocks_the_next():
    worker = pushes("topk")
    worker.encode(gradient(1), partition=0, sequence=1)
    with pytest.raises(
        PreconditionError, match="the outcome of the last push to partition 0 is not known yet"
    ):
        worker.encode(gradient(2), partition=0, sequence=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_other_dtypes_are_encoded_as_float32(dtype):
    given = gradient(1).to(dtype)
    torch.testing.assert_close(
        served(pushes("bf16").encode(given, partition=0, sequence=1)),
        given.float(),
        rtol=2**-8,
        atol=0,
    )
    assert torch.equal(given, gradient(1).to(dtype))


def test_non_floating_point_values_are_refused():
    with pytest.raises(ConfigurationError, match="expected a floating-point vector"):
        pushes("int8").encode(torch.zeros(3, 4), partition=0, sequence=1)
