"""NCCL on one device, as far as one is enough: results of collectives, messages of errors, the end
of a group, and the resources left by connecting.

Tests without spinning kernels also run on the fake device (tests/fake_device) in every run of the
tests, so both must behave the same. On a device: make test-gpu.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, InvalidRequestError, MembershipChanged
from shoal_worker.backends.base import ReduceOp
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.nccl.device import CudaDevice
from torch.distributed import AllreduceOptions

from tests.fake_device.library import FakeCuda, in_threads
from tests.fake_device.machine import Machine
from tests.zygote.children import eventually

_PATIENCE = timedelta(seconds=120)
_ROUNDS = 20

needs_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="no CUDA device with NCCL here",
    ),
]


def _stand_in() -> Callable[[], CudaDevice]:
    machine = Machine()
    return lambda: FakeCuda(machine, 0)


@pytest.fixture(
    params=[
        pytest.param(_stand_in, id="stand-in"),
        pytest.param(lambda: CudaDevice, id="cuda", marks=needs_device),
    ],
)
def device(request: pytest.FixtureRequest) -> Callable[[], CudaDevice]:
    """Returns a factory whose devices are all the same device."""
    made: Callable[[], CudaDevice] = request.param()
    return made


@pytest.fixture(params=[pytest.param(lambda: CudaDevice, id="cuda", marks=needs_device)])
def real_device(request: pytest.FixtureRequest) -> Callable[[], CudaDevice]:
    """Returns a factory whose CUDA devices are all the same device. The fake device is excluded
    because it computes nothing."""
    made: Callable[[], CudaDevice] = request.param()
    return made


def alone(device: CudaDevice, **options: Any) -> NCCLBackend:
    """Returns a group of one rank that has a communicator nevertheless."""
    backend = NCCLBackend(device)
    backend.initialize(
        rank=0, world_size=1, store=dist.HashStore(), **{"connect_timeout": _PATIENCE, **options}
    )
    return backend


@pytest.fixture
def backend(device: Callable[[], CudaDevice]) -> Iterator[NCCLBackend]:
    made = alone(device())
    yield made
    made.shutdown()


def on(backend: NCCLBackend, tensor: torch.Tensor) -> torch.Tensor:
    device = backend._device
    assert isinstance(device, CudaDevice)
    return tensor.to(device.device)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ],
)
def test_every_collective_of_one_rank_returns_its_input(
    backend: NCCLBackend, dtype: torch.dtype
) -> None:
    given = on(backend, torch.arange(12).to(dtype))
    for op in ReduceOp:
        if op is not ReduceOp.AVERAGE or dtype.is_floating_point:
            tensor = given.clone()
            backend.all_reduce(tensor, op)
            assert torch.equal(tensor, given)
    for call in (backend.all_gather, backend.reduce_scatter, backend.all_to_all):
        output = torch.zeros_like(given)
        call(output, given)
        assert torch.equal(output, given)
    output = torch.zeros_like(given)
    backend.scatter(output, given, 0)
    backend.broadcast(output, 0)
    assert torch.equal(output, given)
    backend.barrier()
    assert backend.sum_numbers([1.5, 2.0]) == [1.5, 2.0]
    short = on(backend, torch.ones(3, dtype=torch.float64))
    backend.all_reduce_short(short)
    assert short.tolist() == [1.0] * 3


def test_sparse_tensors_are_reduced(backend: NCCLBackend) -> None:
    dense = on(backend, torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 3.0]]))
    tensor = dense.to_sparse(1)
    backend.process_group.allreduce([tensor], AllreduceOptions()).wait()
    assert torch.equal(tensor.to_dense(), dense)


@pytest.mark.parametrize(
    ("make", "op", "says"),
    [
        (
            lambda: torch.ones(3, dtype=torch.int32),
            dist.ReduceOp.BAND,
            r"Cannot use ReduceOp\.BAND with NCCL",
        ),
        (lambda: torch.ones(2, 3).t(), dist.ReduceOp.SUM, "Tensors must be contiguous"),
        (
            lambda: torch.ones(3, dtype=torch.int16),
            dist.ReduceOp.SUM,
            "Input tensor data type is not supported for NCCL process group",
        ),
    ],
    ids=["a reduction that NCCL lacks", "not contiguous", "a dtype that NCCL lacks"],
)
def test_invalid_arguments_are_refused_and_the_group_stays_usable(
    backend: NCCLBackend, make: Callable[[], torch.Tensor], op: Any, says: str
) -> None:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    with pytest.raises(InvalidRequestError, match=says):
        backend.process_group.allreduce([on(backend, make())], options)
    assert backend.is_initialized


def test_two_ranks_on_one_device_are_refused_on_both(device: Callable[[], CudaDevice]) -> None:
    store = dist.HashStore()

    def connect(rank: int) -> None:
        NCCLBackend(device()).initialize(
            rank=rank, world_size=2, store=store, connect_timeout=_PATIENCE
        )

    for refused in in_threads([lambda rank=rank: connect(rank) for rank in range(2)]):
        assert isinstance(refused, ConfigurationError)
        assert "ranks 0 and 1 are both on cuda:0" in str(refused)


def test_split_group_sums_like_a_newly_connected_one(
    backend: NCCLBackend, device: Callable[[], CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "1")
    for _ in range(3):
        part = NCCLBackend(device())
        part.comes_from(backend, 0)
        part.initialize(rank=0, world_size=1, store=dist.HashStore(), connect_timeout=_PATIENCE)
        tensor = on(part, torch.arange(5.0))
        part.all_reduce(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        part.shutdown()
    backend.all_reduce(on(backend, torch.ones(3)))  # the original group continues
    assert backend._native.comm_split_count() == 3


def end(backend: NCCLBackend, how: str) -> None:
    if how == "finalized":
        assert backend.all_leave(_PATIENCE)
        backend.finalize()()
    backend.shutdown()


@pytest.mark.parametrize("how", ["aborted", "finalized"])
def test_repeatedly_created_groups_leave_no_threads(
    device: Callable[[], CudaDevice], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone(device()).shutdown()
    before = threading.active_count()
    for _ in range(_ROUNDS):
        backend = alone(device())
        backend.all_reduce(on(backend, torch.ones(8)))
        end(backend, how)
    assert "finalized" not in caplog.text  # neither given up nor failed
    eventually(
        lambda: threading.active_count() <= before,
        lambda: f"threads to end: {[each.name for each in threading.enumerate()]}",
    )


# --- on a device only


@pytest.mark.parametrize("how", ["aborted", "finalized"])
def test_repeatedly_created_groups_leave_no_memory(
    real_device: Callable[[], CudaDevice], how: str
) -> None:
    for _ in range(2):
        alone(real_device()).shutdown()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(_ROUNDS):
        backend = alone(real_device())
        backend.all_reduce(on(backend, torch.ones(8)))
        end(backend, how)
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


def spin(seconds: float) -> None:
    """Keeps the current stream busy for about `seconds`."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_collective_behind_a_spinning_kernel_is_issued_at_once_and_awaited(
    real_device: Callable[[], CudaDevice],
) -> None:
    backend = alone(real_device())
    tensors = [on(backend, torch.ones(1 << 20)) for _ in range(3)]
    torch.cuda.synchronize()
    began = time.monotonic()
    spin(2.0)
    works = [backend.process_group.allreduce([tensor], AllreduceOptions()) for tensor in tensors]
    issued = time.monotonic() - began
    assert issued < 0.5  # no one holds a lock that the next collective needs
    assert not works[0].is_completed()
    for work in works:
        work.wait()
    assert time.monotonic() - began > issued
    assert torch.cuda.current_stream().query()
    backend.shutdown()


def test_abort_behind_a_spinning_kernel_frees_memory_once_the_device_is_idle(
    real_device: Callable[[], CudaDevice],
) -> None:
    backend = alone(real_device())
    tensor = on(backend, torch.ones(1 << 20))
    torch.cuda.synchronize()
    spin(2.0)
    work = backend.process_group.allreduce([tensor], AllreduceOptions())
    threading.Timer(0.2, backend.abort, ["a fault"]).start()
    with pytest.raises(MembershipChanged, match="a fault"):
        work.wait()
    assert torch.cuda.current_stream().query()
    tensor.fill_(5)
    torch.cuda.synchronize()
    assert bool((tensor == 5).all())
    backend.shutdown()
    alone(real_device()).shutdown()  # the device can be used again


def test_wait_past_its_timeout_ends_the_group(real_device: Callable[[], CudaDevice]) -> None:
    backend = alone(real_device(), timeout=timedelta(seconds=0.3))
    spin(3.0)
    work = backend.process_group.allreduce([on(backend, torch.ones(8))], AllreduceOptions())
    with pytest.raises(MembershipChanged, match=r"took longer than 0:00:00\.3"):
        work.wait()
    backend.shutdown()
