"""What of the NCCL backend needs no GPU: waiting, aborts and connecting, over stand-ins for NCCL's own group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import DeadlineError, MembershipChanged
from shoal_worker.backends.nccl.backend import DeviceGroup, NCCLBackend
from torch._C._distributed_c10d import AllreduceOptions, Store, Work
from torch.distributed import distributed_c10d

_PATIENCE_S = 60.0


class Kernel(Work):
    """NCCL's work: `wait` returns when it is queued, it runs when the test lets it, and an abort ends it without an error."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.done, self.error = tensor, threading.Event(), ""

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error:
            raise dist.DistBackendError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def run(self) -> None:
        self.tensor.mul_(2)
        self.done.set()


class Device(dist.ProcessGroup):
    """A native group that queues kernels."""

    def __init__(self) -> None:
        super().__init__(0, 2)  # type: ignore[call-arg]  # torch's stub knows only the other constructor
        self.kernels: list[Kernel] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:  # type: ignore[override]  # one of torch's two forms
        if tensors[0].dtype == torch.bool:
            raise RuntimeError("Input tensor data type is not supported")
        self.kernels.append(Kernel(tensors[0]))
        return self.kernels[-1]


def group_on(device: Device, *, timeout_s: float = _PATIENCE_S, ended: Callable[[str], None] = lambda reason: None) -> DeviceGroup:
    return DeviceGroup(device, name="test", timeout=timedelta(seconds=timeout_s), ended=ended)


def waiting(work: Work) -> tuple[threading.Thread, list[Any]]:
    """Waits on another thread: the thread, and what came of it."""
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(work.wait())
        except MembershipChanged as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, outcome


def test_a_wait_lasts_until_the_device_is_done() -> None:
    device = Device()
    tensor = torch.ones(3)
    thread, outcome = waiting(group_on(device).allreduce([tensor], AllreduceOptions()))
    assert not outcome
    device.kernels[0].run()
    thread.join(_PATIENCE_S)
    assert outcome == [True]
    assert tensor.tolist() == [2.0] * 3


def test_an_abort_ends_a_wait_although_the_kernel_ends_without_an_error() -> None:
    device = Device()
    group = group_on(device, ended=lambda reason: device.kernels[0].done.set())
    thread, outcome = waiting(group.allreduce([torch.ones(3)], AllreduceOptions()))
    group.abort("a peer went away")
    thread.join(_PATIENCE_S)
    assert outcome == ["a peer went away"]
    with pytest.raises(MembershipChanged, match="a peer went away"):
        group.allreduce([torch.ones(3)], AllreduceOptions())


def test_a_collective_that_takes_too_long_ends_the_group() -> None:
    reasons: list[str] = []
    work = group_on(Device(), timeout_s=0.01, ended=reasons.append).allreduce([torch.ones(3)], AllreduceOptions())
    with pytest.raises(MembershipChanged, match=r"allreduce on rank 0 of 2 takes longer than 0:00:00\.01"):
        work.wait()
    assert len(reasons) == 1


def test_a_failed_collective_ends_the_group() -> None:
    device = Device()
    group = group_on(device)
    work = group.allreduce([torch.ones(3)], AllreduceOptions())
    device.kernels[0].error = "NCCL error: remote process exited"
    device.kernels[0].done.set()
    with pytest.raises(MembershipChanged, match="remote process exited"):
        work.wait()
    assert group.reason is not None


def test_a_mistake_of_the_caller_leaves_the_group_as_it_is() -> None:
    group = group_on(Device())
    with pytest.raises(RuntimeError, match="not supported") as raised:
        group.allreduce([torch.ones(3, dtype=torch.bool)], AllreduceOptions())
    assert not isinstance(raised.value, MembershipChanged)
    assert group.reason is None


# --- connecting; ProcessGroupGloo stands in for ProcessGroupNCCL


class Native(dist.ProcessGroupGloo):  # type: ignore[misc]  # untyped in this build
    """Connects when the test lets it."""

    ready: threading.Event
    aborted: threading.Event

    class Options(distributed_c10d.ProcessGroupGloo._Options):  # type: ignore[misc, name-defined]  # untyped in this build
        def __init__(self) -> None:
            super().__init__()
            self._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.ready.wait(_PATIENCE_S)

    def abort(self) -> None:
        self.aborted.set()


class OnTheCpu(NCCLBackend):
    def _device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    events = SimpleNamespace(ready=threading.Event(), aborted=threading.Event())
    monkeypatch.setattr(Native, "ready", events.ready, raising=False)
    monkeypatch.setattr(Native, "aborted", events.aborted, raising=False)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", Native, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    yield events
    events.ready.set()


def initialize(backend: NCCLBackend, store: Store, *, connect_timeout_s: float = _PATIENCE_S) -> None:
    backend.initialize(rank=0, world_size=1, store=store, connect_timeout=timedelta(seconds=connect_timeout_s))


def test_it_connects_reduces_and_shuts_down(native: SimpleNamespace) -> None:
    native.ready.set()
    backend = OnTheCpu()
    initialize(backend, dist.HashStore())
    tensor = torch.ones(3)
    backend.all_reduce(tensor)
    output = torch.empty(3)
    backend.all_gather(output, tensor)
    assert output.tolist() == [1.0] * 3
    backend.shutdown()
    assert native.aborted.wait(_PATIENCE_S)
    with pytest.raises(MembershipChanged, match="was shut down"):
        backend.all_reduce(tensor)


def test_connecting_can_be_given_up(native: SimpleNamespace) -> None:
    backend = OnTheCpu()
    timer = threading.Timer(0.05, backend.abort, ["superseded"])
    timer.start()
    with pytest.raises(MembershipChanged, match="superseded"):
        initialize(backend, dist.HashStore())
    timer.join()


def test_a_failure_to_connect_is_told_with_its_cause(native: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Native, device: torch.device) -> None:
        raise dist.DistBackendError("NCCL error in: init.cc:1, unhandled system error")

    monkeypatch.setattr(Native, "eager_connect_single_device", fail)
    with pytest.raises(MembershipChanged, match="connecting with NCCL failed: NCCL error in"):
        initialize(OnTheCpu(), dist.HashStore())


def test_a_peer_that_does_not_come_is_a_deadline(native: SimpleNamespace) -> None:
    with pytest.raises(DeadlineError, match=r"connect_timeout=0\.05 s"):
        initialize(OnTheCpu(), dist.HashStore(), connect_timeout_s=0.05)


def test_a_group_whose_device_ends_it_ends_the_backend(native: SimpleNamespace) -> None:
    native.ready.set()
    backend = OnTheCpu()
    initialize(backend, dist.HashStore())
    group = backend.process_group
    assert isinstance(group, DeviceGroup)
    group.abort("a peer went away")
    assert not backend.is_initialized
    assert native.aborted.wait(_PATIENCE_S)
    backend.shutdown()
