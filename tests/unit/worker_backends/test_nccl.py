"""The NCCL backend on a fake device (tests/fake_device): group ends, memory, errors and
connecting."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed as dist
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    InvalidRequestError,
    MembershipChanged,
)
from shoal_worker.backends import native_threads
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.nccl.device import QUIET, READ_LATER, USED, WATCHDOG, library, reporting
from torch.distributed import AllreduceOptions, AllToAllOptions
from torch.distributed import distributed_c10d as c10d

from tests.fake_device.library import FakeCuda, FakeNCCL, FakeNCCL2, Options, in_threads
from tests.fake_device.machine import Stream
from tests.fake_device.ranks import PATIENCE, SEEDS, ProcessEnded, Ranks, close, outcome, started
from tests.zygote.children import eventually

_SHORT = timedelta(seconds=0.2)
ends_in_a_thread = pytest.mark.filterwarnings(
    "ignore:Exception in thread shoal-nccl-limit:pytest.PytestUnhandledThreadExceptionWarning"
)
"""Marks tests in which the thread that limits the time of an abort would also have ended the
process."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment after the test."""
    for name in (*WATCHDOG, *QUIET, *READ_LATER, "TORCH_NCCL_NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if reporting.locked():
        reporting.release()


# --- collectives


def test_ranks_connect_reduce_and_leave() -> None:
    ranks = Ranks(3)
    backends = ranks.form()

    def use(rank: int) -> Any:
        tensor = torch.full((4,), rank + 1.0)
        backends[rank].all_reduce(tensor)
        gathered = torch.empty(12)
        backends[rank].all_gather(gathered, tensor)
        return tensor.tolist(), gathered.sum().item(), backends[rank].sum_numbers([rank, 1.0])

    assert (
        in_threads([lambda rank=rank: use(rank) for rank in range(3)])
        == [([6.0] * 4, 72.0, [3.0, 3.0])] * 3
    )
    close(backends)
    with pytest.raises(MembershipChanged, match="was shut down"):
        backends[0].all_reduce(torch.ones(1))


def test_a_collective_returns_before_it_has_run_and_a_wait_lasts_until_it_has() -> None:
    ranks = Ranks(2)
    backends = ranks.form()
    tensors = [torch.ones(3), torch.ones(3)]
    works = [started(backend, tensor) for backend, tensor in zip(backends, tensors, strict=True)]
    assert tensors[0].tolist() == [1.0] * 3
    tensors[1].fill_(5)  # the collective still reads this tensor
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor.tolist() == [6.0] * 3
    close(backends)


def test_host_numbers_and_messages_do_not_wait_for_the_device() -> None:
    """Sums between hosts complete while collectives on both devices never end."""
    ranks = Ranks(2)
    backends = ranks.form()
    started(backends[0], torch.ones(3))
    started(backends[1], torch.ones(5))
    assert (
        in_threads(
            [lambda backend=backend: backend.sum_numbers([1.0, 2.0]) for backend in backends]
        )
        == [[2.0, 4.0]] * 2
    )
    close(backends)


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_parts_are_exchanged_with_equal_and_unequal_sizes(
    blocking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All-to-all works with equal and with uneven parts. torch raises "operation in progress" for
    equal parts without sizes on a non-blocking communicator."""
    monkeypatch.setenv("SHOAL_NCCL_BLOCKING", blocking)
    ranks = Ranks(2)
    backends = ranks.form()

    def exchange(rank: int) -> Any:
        given = torch.arange(4.0) + 10 * rank
        by_backend, uneven = torch.empty(4), torch.empty(2 if rank == 0 else 6)
        backends[rank].all_to_all(by_backend, given)
        backends[rank].all_to_all(uneven, given, [1, 1] if rank == 0 else [3, 3], [1, 3])
        by_group = []
        # the names used by torch's Python and C++
        for name in ("all_to_all_single", "alltoall_base"):
            by_group.append(torch.empty(4))
            getattr(backends[rank].process_group, name)(
                by_group[-1], given, [], [], AllToAllOptions()
            ).wait()
        assert all(torch.equal(each, by_backend) for each in by_group)
        return by_backend.tolist(), uneven.tolist()

    assert in_threads([lambda rank=rank: exchange(rank) for rank in range(2)]) == [
        ([0.0, 1.0, 10.0, 11.0], [0.0, 10.0]),
        ([2.0, 3.0, 12.0, 13.0], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]),
    ]
    close(backends)


@pytest.mark.parametrize(
    ("output", "given"),
    [
        (torch.empty(2), torch.ones(4)),
        (torch.empty(4, dtype=torch.int32), torch.ones(4)),
        (torch.empty(3), torch.ones(3)),
        (torch.tensor(0.0), torch.tensor(1.0)),
    ],
    ids=["shorter", "of another dtype", "of three rows", "without rows"],
)
def test_an_exchange_of_tensors_that_do_not_match_is_refused(
    output: torch.Tensor, given: torch.Tensor
) -> None:
    """An all-to-all of tensors that do not match is refused. NCCL would write past the end of a
    shorter output, because it gets only one count."""
    backends = Ranks(2).form()
    for backend in backends:
        with pytest.raises(
            InvalidRequestError, match="expected the same dtype and number of elements"
        ):
            cast(Any, backend.process_group).all_to_all_single(
                output, given, [], [], AllToAllOptions()
            )
    close(backends)


# --- the end of a group


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_unused_by_the_device_once_a_wait_has_failed(seed: int) -> None:
    ranks = Ranks(2, seed)
    backends = ranks.form()
    tensor = torch.ones(3)
    work = started(backends[0], tensor)
    threading.Thread(target=backends[1].abort, args=["a fault"]).start()
    with pytest.raises(MembershipChanged):
        work.wait()
    tensor.fill_(5)
    ranks.run_on()
    assert tensor.tolist() == [5.0] * 3
    close(backends)


@pytest.mark.parametrize("seed", SEEDS)
def test_redo_in_the_next_group_has_exclusive_use_of_the_memory(seed: int) -> None:
    """Leaving an ended group in which no wait was in progress waits until the memory is unused, so
    that the redo in the next group has it exclusively."""
    ranks = Ranks(3, seed)
    backends = ranks.form()
    tensors = [torch.ones(3) for _ in range(2)]
    for rank, tensor in enumerate(tensors):
        started(backends[rank], tensor)
    backends[2].abort("a fault")
    close(backends)
    again = ranks.form([0, 1])

    def redo(rank: int) -> Any:
        tensors[rank].fill_(rank + 1.0)
        again[rank].all_reduce(tensors[rank])
        return tensors[rank].tolist()

    assert in_threads([lambda rank=rank: redo(rank) for rank in range(2)]) == [[3.0] * 3] * 2
    ranks.run_on()
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2
    close(again)


def test_missing_peer_ends_a_spinning_collective() -> None:
    """The hosts' own group notices the loss of a peer and ends a spinning collective. NCCL does not
    notice."""
    ranks = Ranks(2)
    backends = ranks.form()
    work = started(backends[0], torch.ones(3))
    began = time.monotonic()
    backends[1].shutdown()
    with pytest.raises(MembershipChanged):
        work.wait()
    assert time.monotonic() - began < 20
    close(backends)


def test_collective_beyond_its_timeout_ends_the_group() -> None:
    ranks = Ranks(2)
    backends = ranks.form(timeout=_SHORT)
    with pytest.raises(
        MembershipChanged, match=r"allreduce on rank 0 of 2 took longer than 0:00:00\.2"
    ):
        started(backends[0], torch.ones(3)).wait()
    assert not backends[0].is_initialized
    close(backends)


@ends_in_a_thread
def test_an_abort_that_does_not_complete_ends_the_process() -> None:
    ranks = Ranks(2)
    backends = ranks.form(limit=_SHORT)
    ranks.machine.aborts_held = True
    work = started(backends[0], torch.ones(3))
    backends[0].abort("a fault")
    ended = outcome(work.wait)
    assert isinstance(ended, ProcessEnded)
    assert ended.args[0] == 75
    assert "cuda:0 was still busy 0.2 s after" in ended.args[1]
    # the next group does not get the memory either
    assert isinstance(outcome(backends[0].shutdown), ProcessEnded)
    ranks.machine.release_aborts()
    close(backends)


def test_heartbeats_continue_during_a_long_abort() -> None:
    """Heartbeats continue during a long abort. Shoal must not query a work at this time: torch 2.11
    would keep the GIL while it waits for a mutex that the abort holds."""
    ranks = Ranks(2)
    ranks.machine.freeze_s = 3.0
    backends = ranks.form()
    ranks.machine.aborts_held = True
    with heartbeats() as (beats, longest_pause):
        work = started(backends[0], torch.ones(3))
        waiting = threading.Thread(target=outcome, args=[work.wait])
        waiting.start()
        backends[0].abort("a fault")
        eventually(lambda: stream_of(ranks, 0).aborting, "the abort to begin")
        assert work.is_completed()  # as torch's code queries it
        assert work.ended  # as the thread that measures the time queries it
        before = beats()
        eventually(lambda: beats() > before + 50, "heartbeats")
        assert waiting.is_alive()
    assert ranks.machine.frozen == []
    assert longest_pause() < ranks.machine.freeze_s / 2
    ranks.machine.release_aborts()
    waiting.join()
    close(backends)


@contextlib.contextmanager
def heartbeats() -> Iterator[tuple[Callable[[], int], Callable[[], float]]]:
    """Runs a thread that beats a hundred times a second. Yields functions that return the number of
    beats and the longest pause between two in seconds."""
    done, pauses = threading.Event(), [0.0]

    def beat() -> None:
        last = time.monotonic()
        while not done.wait(0.01):
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        yield lambda: len(pauses), lambda: max(pauses)
    finally:
        done.set()
        beating.join()


@ends_in_a_thread
def test_stuck_abort_ends_the_process_even_with_a_host_blocked_in_the_device() -> None:
    """A stuck abort ends the process even if the main thread is blocked in the device and never
    reaches one of Shoal's waits."""
    ranks = Ranks(2)
    backends = ranks.form(limit=_SHORT)
    ended: list[str] = []

    def note(status: int, why: str) -> NoReturn:
        ended.append(why)
        raise ProcessEnded(status, why)

    backends[0]._ending._end_process = note
    ranks.machine.aborts_held = True
    started(backends[0], torch.ones(3))
    backends[0].abort("a fault")
    eventually(lambda: bool(ended), "the process to end")
    assert "cuda:0 was still busy 0.2 s after" in ended[0]
    ranks.machine.release_aborts()
    close(backends)


def test_a_device_that_has_failed_ends_the_process_of_its_rank() -> None:
    """A failed device ends the process of its rank, because new groups on the device would fail
    repeatedly."""
    ranks = Ranks(2)
    backends = ranks.form()
    work = started(backends[0], torch.ones(3))
    ranks.machine.failed[0] = "an illegal memory access was encountered"
    for call in (work.wait, lambda: started(backends[0], torch.ones(3))):
        ended = outcome(call)
        assert isinstance(ended, ProcessEnded)
        assert ended.args[0] == 75
        assert (
            "cuda:0 failed (CUDA error: an illegal memory access was encountered)" in ended.args[1]
        )


def test_failed_device_does_not_reconnect_forever() -> None:
    ranks = Ranks(2)
    ranks.machine.failed[0] = "unspecified launch failure"
    ended, other = ranks.form(
        connect_timeout=timedelta(seconds=2), connect_limit=timedelta(seconds=2)
    )
    assert isinstance(ended, ProcessEnded)
    assert "cuda:0 failed (CUDA error: unspecified launch failure)" in ended.args[1]
    assert isinstance(other, DeadlineError | MembershipChanged | NCCLBackend)
    close([other])


# --- all ranks leave


def test_communicator_is_finalized_instead_of_aborted_when_all_ranks_leave() -> None:
    ranks = Ranks(3)
    backends = ranks.form()
    for work in [started(backend, torch.ones(3)) for backend in backends]:
        work.wait()
    assert (
        in_threads([lambda backend=backend: leave(backend) for backend in backends]) == [True] * 3
    )
    assert [(stream.destroyed, stream.aborting) for stream in ranks.machine.streams] == [
        (True, False)
    ] * 3
    with pytest.raises(MembershipChanged, match="was shut down"):
        backends[0].all_reduce(torch.ones(1))


def test_rank_that_leaves_alone_waits_briefly_and_aborts() -> None:
    ranks = Ranks(2)
    backends = ranks.form()
    assert outcome(lambda: leave(backends[0], within=_SHORT)) is False
    assert (stream_of(ranks, 0).finalizing, stream_of(ranks, 0).aborted) == (False, True)
    assert outcome(lambda: leave(backends[1])) is False  # because the first rank has left
    assert stream_of(ranks, 1).aborted


@pytest.mark.parametrize("where", ["in the group", "in a part"])
def test_unfinished_collectives_are_aborted_when_all_leave(where: str) -> None:
    """A group that all ranks leave during a step that only one rank has begun is aborted soon. A
    finalization would wait forever for the collective of that step."""
    ranks = Ranks(2)
    wholes, parts = ranks.form(), ranks.form()
    started((wholes if where == "in the group" else parts)[0], torch.ones(3))
    begun = time.monotonic()
    assert in_threads([lambda whole=whole: whole.all_leave(_SHORT) for whole in wholes]) == [
        False,
        False,
    ]
    assert time.monotonic() - begun < PATIENCE.total_seconds() / 2
    close([*parts, *wholes])
    assert all(stream.aborted and not stream.finalizing for stream in ranks.machine.streams)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_rank_that_dies_as_all_leave_delays_the_others_only_briefly(
    dies: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks give up a finalization after a while if another rank dies during it. Nothing can end it
    earlier, because torch holds the locks that an abort needs. Afterwards, no thread touches the
    half-destroyed communicator."""
    ranks = Ranks(2)
    backends = ranks.form(finalize_limit=_SHORT)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1")
    kept: list[object] = []
    monkeypatch.setattr(native_threads, "keep", kept.append)
    own, other = stream_of(ranks, 0), stream_of(ranks, 1)

    def die() -> bool:
        all_left = backends[1].all_leave(PATIENCE)
        if dies == "before":
            backends[1].abort("died")
        return all_left

    assert in_threads([lambda: leave(backends[0]), die]) == [True, True]
    assert "abandoned an NCCL group on cuda:0, which did not shut down within 0.2 s" in caplog.text
    eventually(
        lambda: "could not shut down an NCCL group on cuda:0 in order: NCCL timeout" in caplog.text,
        "torch's timeout",
    )
    assert (own.finalizing, own.destroyed, own.aborting) == (True, False, False)
    assert not other.destroyed
    close(backends)
    assert kept == ranks.devices[0].natives
    assert not ranks.machine.crashes


def test_abort_after_a_finalization_has_begun_does_nothing() -> None:
    """An abort after a finalization has begun has no effect. torch would pass NCCL a destroyed
    communicator, which would crash the process."""
    ranks = Ranks(2)
    backends = ranks.form()
    assert (
        in_threads([lambda backend=backend: backend.all_leave(PATIENCE) for backend in backends])
        == [True] * 2
    )
    waits = [backend.finalize() for backend in backends]
    in_threads([lambda backend=backend: backend.abort("superseded") for backend in backends])
    in_threads(waits)
    close(backends)
    assert [stream.destroyed for stream in ranks.machine.streams] == [True] * 2
    assert not ranks.machine.crashes


def test_finalization_after_an_abort_has_begun_does_nothing() -> None:
    ranks = Ranks(2)
    backends = ranks.form()
    assert (
        in_threads([lambda backend=backend: backend.all_leave(PATIENCE) for backend in backends])
        == [True] * 2
    )
    backends[0].abort("superseded")
    backends[0].finalize()()
    assert (stream_of(ranks, 0).finalizing, stream_of(ranks, 0).aborted) == (False, True)
    close(backends)


def stream_of(ranks: Ranks, rank: int) -> Stream:
    """Returns one rank's side of the communicator that it connected first."""
    stream = ranks.devices[rank].natives[0]._stream
    assert isinstance(stream, Stream)
    return stream


def leave(backend: NCCLBackend, within: timedelta = PATIENCE) -> bool:
    """Leaves the group and returns whether all ranks did."""
    together = backend.all_leave(within)
    if together:
        backend.finalize()()
    backend.shutdown()
    return together


# --- errors of NCCL


@pytest.mark.parametrize("seed", SEEDS)
def test_nccl_error_ends_the_group_and_leaves_memory_unused_by_the_device(seed: int) -> None:
    """An error of NCCL ends the group, and its memory is unused afterwards, although torch reports
    the work as complete while its kernel is still running."""
    ranks = Ranks(2, seed)
    backends = ranks.form()
    tensor = torch.ones(3)
    work = started(backends[0], tensor)
    ranks.devices[0].natives[0]._stream.error = "unhandled system error, remote process exited"
    with pytest.raises(
        MembershipChanged,
        match=r"allreduce on rank 0 of 2 failed: NCCL error: unhandled system error, remote "
        r"process exited",
    ):
        work.wait()
    tensor.fill_(5)
    ranks.run_on()
    assert tensor.tolist() == [5.0] * 3
    close(backends)


@pytest.mark.parametrize(
    ("tensor", "op", "says"),
    [
        (
            torch.ones(3, dtype=torch.int16),
            dist.ReduceOp.SUM,
            "Input tensor data type is not supported for NCCL process group",
        ),
        (
            torch.ones(3, dtype=torch.int32),
            dist.ReduceOp.BAND,
            r"Cannot use ReduceOp\.BAND with NCCL",
        ),
        (torch.ones(4, 4).t(), dist.ReduceOp.SUM, "Tensors must be contiguous"),
    ],
)
def test_invalid_argument_is_the_callers_error_and_the_group_stays_usable(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, says: str
) -> None:
    ranks = Ranks(2)
    backends = ranks.form()
    tensor = tensor.clone() if tensor.is_contiguous() else torch.arange(6.0).view(2, 3).t()
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    for backend in backends:
        with pytest.raises(InvalidRequestError, match=says):
            backend.process_group.allreduce([tensor], options)
        assert backend.is_initialized
    close(backends)


def test_sparse_gradients_are_summed() -> None:
    """Sparse gradients are summed by Shoal. NCCL's own error for them would look like a failure of
    the group, and the ranks would form new groups forever."""
    ranks = Ranks(3)
    backends = ranks.form()
    dense = [torch.zeros(5, 2) for _ in range(3)]
    dense[0][1] = dense[0][4] = 1.0
    dense[2][4] = 2.0  # rank 1 has no rows

    def reduce(rank: int) -> torch.Tensor:
        tensor = dense[rank].to_sparse(1)
        started(backends[rank], tensor).wait()
        return tensor.to_dense()

    for summed in in_threads([lambda rank=rank: reduce(rank) for rank in range(3)]):
        assert torch.equal(summed, sum(dense, torch.zeros(5, 2)))
    close(backends)


# --- torch's watchdog


def test_the_watchdog_neither_kills_nor_sleeps_whatever_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_DESYNC_DEBUG", "1")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")
    ranks = Ranks(2)
    backends = ranks.form()
    natives = [device.natives[0] for device in ranks.devices]
    work = started(backends[0], torch.ones(3))
    ranks.machine.pass_time(3600)  # as during a step that compiles, or while a peer loads data
    assert [(native.would_have_killed, native.would_have_slept_s) for native in natives] == [
        (None, 0.0)
    ] * 2
    assert not work.is_completed()  # it has not failed either
    natives[0]._stream.error = "remote process exited"
    ranks.machine.pass_time(1)
    assert (natives[0].would_have_killed, natives[0].would_have_slept_s) == (None, 0.0)
    close(backends)


@pytest.mark.parametrize("kind", [FakeNCCL, FakeNCCL2])
@pytest.mark.parametrize("connects_first", ["the script", "Shoal"])
def test_the_watchdog_of_a_scripts_own_group_still_ends_a_collective_that_hangs(
    connects_first: str, kind: type[FakeNCCL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that the script creates itself keeps its timeout, whether it was created before or
    after Shoal's groups. Without its watchdog, a collective whose peer is missing would hang."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as launchers do
    before = dict(os.environ)
    ranks = Ranks(2)

    def own(rank: int, store: dist.Store) -> FakeNCCL:
        group = kind(ranks.machine, 10 + rank, store, rank, 2, Options())
        if kind is FakeNCCL:
            group.eager_connect_single_device(torch.device("cpu"))
        return group

    def owns() -> list[FakeNCCL]:
        store = dist.HashStore()
        return in_threads([lambda rank=rank: own(rank, store) for rank in range(2)])

    if connects_first == "Shoal":
        backends, groups = ranks.form(), owns()
    else:
        groups, backends = owns(), ranks.form()
    started(backends[0], torch.ones(3))
    groups[0].allreduce([torch.ones(3)], AllreduceOptions())
    ranks.machine.pass_time(3600)
    assert groups[0].would_have_killed == "a collective ran for 600 s"
    assert {device.natives[0].would_have_killed for device in ranks.devices} == {None}
    kept = {*READ_LATER, "TORCH_NCCL_NONBLOCKING_TIMEOUT"}
    assert {name: value for name, value in os.environ.items() if name not in kept} == before
    in_threads([group.abort for group in groups])
    close(backends)


def test_variables_that_do_not_apply_to_shoals_groups_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "4321")
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "10")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    ranks = Ranks(1)
    for _ in range(2):
        close(ranks.form())
    (said,) = [each for each in caplog.messages if "overridden" in each]
    assert said.startswith(
        "TORCH_NCCL_NONBLOCKING_TIMEOUT=10, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=4321 was overridden"
    )


def test_a_debug_level_that_lets_the_watchdog_kill_is_refused() -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for refused in Ranks(2).form():
            assert isinstance(refused, ConfigurationError)
            assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in str(refused)
    finally:
        dist.set_debug_level(level)


def test_missing_nccl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # some builds of torch have NCCL
    with pytest.raises(ConfigurationError, match="this build of torch lacks NCCL"):
        NCCLBackend()


# --- torch's class


@pytest.mark.skipif(
    torch.version.cuda is None, reason="torch's builds for CPUs have no ProcessGroupNCCL"
)
def test_torch_has_the_class_that_shoal_builds_on() -> None:
    """The names and signatures of ProcessGroupNCCL that Shoal uses exist in this torch, also those
    without which it only does not split. Without a GPU, no group can be created."""
    native = library()
    options = native.Options()
    options._timeout, options.config.blocking = timedelta(days=3650), 0
    options.split_from, options.split_color = None, 3
    assert (options._timeout, options.config.blocking) == (timedelta(days=3650), 0)
    assert native.get_runtime_nccl_version() >= (2, 18, 0)
    for name, arguments in {
        "abort": "",
        "shutdown": "",
        "eager_connect_single_device": r", \w+: [^,]+",
        "allreduce": r", tensors: .+, opts: \S+AllreduceOptions = .+",
    }.items():
        assert re.search(rf"\b{name}\(self: [^,)]+{arguments}\) -> ", getattr(native, name).__doc__)
    with pytest.raises(ValueError, match="no GPUs found"):  # it has accepted the arguments
        native(dist.HashStore(), 0, 1, options)


class _OtherClass:
    """A class that torch might offer under the same name."""


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (None, "ProcessGroupNCCL"),
        (_OtherClass, ", ".join(f"ProcessGroupNCCL.{name}" for name in USED)),
    ],
    ids=["without the class", "with another class"],
)
def test_a_torch_without_the_class_is_named(
    found: type | None, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises an error at the first use of the backend if torch drops or replaces the class."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: found is not None)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL2", _OtherClass, raising=False)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", found, raising=False)
    with pytest.raises(ConfigurationError) as refused:
        NCCLBackend()
    assert f"torch {torch.__version__} has no {missing}, which Shoal" in str(refused.value)
    assert "Install torch 2.11 to 2.15" in str(refused.value)


# --- connecting


def test_two_ranks_on_one_device_are_reported_on_both() -> None:
    ranks = Ranks(3, devices=[0, 1, 0])
    for refused in ranks.form():
        assert isinstance(refused, ConfigurationError)
        assert "ranks 0 and 2 are both on cuda:0 (GPU-0)" in str(refused)
        assert "--nproc-per-node gpu" in str(refused)
    assert not any(device.natives for device in ranks.devices)  # NCCL was not called


def test_absent_peer_is_a_deadline_without_a_call_to_nccl() -> None:
    ranks = Ranks(2)
    backend = ranks.backend(0)
    with pytest.raises(DeadlineError, match=r"ranks .* did not arrive"):
        backend.initialize(
            rank=0, world_size=2, store=dist.HashStore(), connect_timeout=timedelta(seconds=1)
        )
    assert not ranks.devices[0].natives


def test_a_library_that_does_not_connect_is_given_up_and_leaves_nothing() -> None:
    before = nccl_threads()
    ranks = Ranks(2)
    ranks.machine.connecting_held = True
    store = dist.HashStore()

    def connect(rank: int) -> None:
        backend = ranks.backend(rank, connect_limit=timedelta(seconds=1))
        backend.initialize(
            rank=rank, world_size=2, store=store, connect_timeout=timedelta(seconds=1)
        )

    for given_up in in_threads([lambda rank=rank: connect(rank) for rank in range(2)]):
        assert isinstance(given_up, DeadlineError | MembershipChanged)
    eventually(
        lambda: all(stream.aborted for stream in ranks.machine.streams), "all streams to be aborted"
    )
    assert not ranks.machine.frozen
    eventually(lambda: not (nccl_threads() - before), "threads of NCCL to end")


def test_connecting_ends_at_once_when_given_up() -> None:
    before = nccl_threads()
    ranks = Ranks(2)
    ranks.machine.connecting_held = True
    backends = [ranks.backend(rank, connect_limit=timedelta(seconds=4)) for rank in range(2)]
    store = dist.HashStore()

    def connect(rank: int) -> float:
        try:
            backends[rank].initialize(
                rank=rank, world_size=2, store=store, connect_timeout=timedelta(seconds=4)
            )
        except MembershipChanged:
            return time.monotonic()
        raise AssertionError("connected")

    def give_up() -> float:
        eventually(lambda: len(ranks.machine.streams) == 2, "both ranks to connect")
        backends[0].abort("superseded")
        return time.monotonic()

    here, there, given_up = in_threads([lambda: connect(0), lambda: connect(1), give_up])
    assert here - given_up < 3
    assert there - given_up < 3
    eventually(lambda: not (nccl_threads() - before), "threads of NCCL to end")


def test_dead_peer_of_a_blocking_communicator_blocks_only_the_connecting_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With blocking communicators, only the connecting thread waits for a dead peer, because
    nothing can abort the connection. If the peer connects after all, the communicator is aborted
    and never used."""
    monkeypatch.setenv("SHOAL_NCCL_BLOCKING", "1")
    before = nccl_threads()
    ranks = Ranks(2)
    ranks.machine.connecting_held = True
    backends = [ranks.backend(rank, limit=_SHORT) for rank in range(2)]
    store = dist.HashStore()

    def connect(rank: int) -> None:
        backends[rank].initialize(rank=rank, world_size=2, store=store, connect_timeout=PATIENCE)

    def die() -> None:
        eventually(lambda: len(ranks.machine.streams) == 2, "both ranks to connect")
        backends[1].abort("died")

    begun = time.monotonic()
    for given_up in in_threads([lambda: connect(0), lambda: connect(1), die])[:2]:
        assert isinstance(given_up, MembershipChanged)
    assert time.monotonic() - begun < PATIENCE.total_seconds() / 2
    for backend in backends:
        backend.rest()  # the group uses no memory any more, so the next one may form
    eventually(
        lambda: [each.name for each in nccl_threads() - before] == ["shoal-nccl-forming"] * 2,
        "the threads that abort to end",
    )
    for stream in ranks.machine.streams:
        stream.communicator.stand()
    eventually(
        lambda: all(stream.aborted for stream in ranks.machine.streams),
        "late communicators to be aborted",
    )
    eventually(lambda: not (nccl_threads() - before), "threads of NCCL to end")
    assert not any(stream.queue for stream in ranks.machine.streams)
    close(backends)


def test_ranks_connect_and_reduce_with_blocking_communicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_NCCL_BLOCKING", "1")
    ranks = Ranks(3)
    backends = ranks.form()
    assert {
        native._options.config.blocking for device in ranks.devices for native in device.natives
    } == {1}
    tensors = [torch.ones(2) for _ in range(3)]
    in_threads([lambda rank=rank: backends[rank].all_reduce(tensors[rank]) for rank in range(3)])
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 2] * 3
    close(backends)


def test_rank_absent_from_a_split_delays_the_others_and_ends_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that wait for another rank to join a split time out, and no process ends. Aborting the
    parent group waits as long, because torch holds its lock."""
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "1")
    ranks, limit = Ranks(4), timedelta(seconds=2)
    wholes = ranks.form(limit=timedelta(seconds=1))
    parts = [ranks.backend(rank, connect_limit=limit, limit=_SHORT) for rank in range(2)]
    store = dist.HashStore()

    def split(rank: int) -> None:
        parts[rank].comes_from(wholes[rank], 0)
        parts[rank].initialize(rank=rank, world_size=2, store=store, connect_timeout=limit)

    def die() -> None:
        eventually(
            lambda: sum(stream.splits for stream in ranks.machine.streams) == 2,
            "two ranks to split",
        )
        for whole in wholes:
            whole.abort("a fault")
        for part in parts:
            part.abort("a fault")

    for given_up in in_threads([lambda: split(0), lambda: split(1), die])[:2]:
        assert isinstance(given_up, MembershipChanged)
    assert in_threads([whole.shutdown for whole in wholes]) == [None] * 4  # no process has ended
    assert all(stream.aborted for stream in ranks.machine.streams)


@ends_in_a_thread
def test_stuck_abort_after_a_split_has_the_usual_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "1")
    ranks = Ranks(2)
    wholes, store = ranks.form(limit=_SHORT), dist.HashStore()
    parts = [ranks.backend(rank) for rank in range(2)]

    def split(rank: int) -> None:
        parts[rank].comes_from(wholes[rank], 0)
        parts[rank].initialize(rank=rank, world_size=2, store=store)

    assert in_threads([lambda: split(0), lambda: split(1)]) == [None, None]
    assert ranks.devices[0].natives[0].comm_split_count() == 1
    ranks.machine.aborts_held = True
    ended = outcome(wholes[0].shutdown)
    assert isinstance(ended, ProcessEnded)
    assert "was still busy 0.2 s after" in ended.args[1]
    ranks.machine.release_aborts()
    close([*parts, *wholes])


def nccl_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shoal-nccl")}


def test_ranks_that_disagree_on_split_or_connect_are_refused_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeCuda, "splits", property(lambda device: device.number == 1))
    for refused in Ranks(3).form():
        assert isinstance(refused, ConfigurationError)
        assert refused.reason == "NCCL_SPLIT_DIFFERS"
        assert (
            "rank 1 would split subgroups off the communicator of all ranks, but ranks 0 and 2"
            in str(refused)
        )
