"""The ranks that test_mpi.py starts with mpiexec. All MPI checks share one start of the processes,
because it is slow."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError, InvalidRequestError
from shoal_worker.backends import GroupEndedError
from shoal_worker.backends.mpi.backend import MPIBackend
from shoal_worker.backends.mpi.group import MPIGroup
from shoal_worker.elastic.session.worker_process import open_session, set_session

from tests.integration.worker_backends.conformance import CHECKS, check_backend


def backend_collectives() -> None:
    """Checks the collectives of CommunicationBackend on their own communicator."""
    backend = MPIBackend()
    backend.initialize()
    check_backend(backend)
    halves = torch.full((8,), 256.0 if backend.rank == 0 else 1.0, dtype=torch.bfloat16)
    backend.all_reduce(halves)
    assert halves.eq(torch.tensor(255.0 + backend.world_size).bfloat16()).all(), halves
    backend.shutdown()
    assert not backend.is_initialized


def booleans_and_complex_numbers() -> None:
    """dtypes that MPI represents differently, or not at all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False, True]
    numbers = torch.full((2,), 1 + 2j)
    dist.all_reduce(numbers)
    assert numbers.tolist() == [size * (1 + 2j)] * 2


def non_contiguous_parts() -> None:
    """Non-contiguous tensors are sent through a copy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = list(torch.zeros(size, 2, 3).transpose(0, 2).unbind(2))  # not contiguous
    dist.all_gather(outputs, torch.full((3, 2), float(rank)))
    assert [one.unique().tolist() for one in outputs] == [[float(one)] for one in range(size)]
    strided = torch.zeros(4, 4).t()[::2]
    dist.broadcast(strided, 0) if rank else dist.broadcast(torch.ones(2, 4), 0)
    assert rank == 0 or strided.eq(1).all()


def a_subset_of_ranks_has_its_own_communicator() -> None:
    """The communicator has the ranks in the requested order."""
    world = dist.get_rank()
    members = [3, 1] if world % 2 else [0, 2]
    backend = MPIBackend()
    backend.initialize(rank=members.index(world), world_size=2, members=members)
    gathered = torch.empty(2, dtype=torch.int64)
    backend.all_gather(gathered, torch.tensor([world]))
    assert gathered.tolist() == members
    backend.shutdown()


def a_rank_or_size_other_than_mpis_is_refused() -> None:
    """MPI decides rank and size."""
    with _raises(
        ConfigurationError,
        "rank=0, world_size=7: MPI started this process as rank . of 4; start it with `mpiexec -n "
        "7`",
    ):
        MPIBackend().initialize(rank=0, world_size=7)


def a_message_that_is_too_long_is_refused() -> None:
    """The receiver refuses it."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(5), 1)
    elif dist.get_rank() == 1:
        with _raises(InvalidRequestError, "recv from rank 0: the message is longer"):
            dist.recv(torch.ones(3), 0)
    dist.barrier()


def a_wait_ends_at_its_deadline() -> None:
    """The timeout ends the group on all ranks."""
    backend = MPIBackend()
    backend.initialize(timeout=timedelta(milliseconds=300))
    if backend.rank != 0:
        with _raises(
            GroupEndedError, r"all_reduce\(SUM, float32\[1\]\): waited 0.3 s for the other ranks"
        ):
            backend.all_reduce(torch.ones(1))
        assert not backend.is_initialized
    dist.barrier()
    if backend.rank == 0:
        with _raises(GroupEndedError, "waited 0.3 s"):
            backend.barrier()
    dist.barrier()
    backend.shutdown()


def an_abort_reaches_waiting_ranks() -> None:
    """Their error contains the reason of the abort."""
    backend = MPIBackend()
    backend.initialize()
    if backend.rank == 1:
        backend.abort("generation 9 began")
    with _raises(GroupEndedError, "generation 9 began"):
        backend.all_reduce(torch.ones(1 << 18))
    dist.barrier()
    backend.shutdown()


def an_abort_reaches_all_threads_that_poll_at_once() -> None:
    """The abort is a single message. A thread that finds it already received does not wait for
    another."""
    for _ in range(12):
        backend = MPIBackend()
        backend.initialize()
        if backend.rank == 1:
            backend.abort("over")
        else:
            looking = [
                threading.Thread(target=_poll_until_ended, args=[backend], daemon=True)
                for _ in range(8)
            ]
            for thread in looking:
                thread.start()
            for thread in looking:
                thread.join(20)
            assert not any(thread.is_alive() for thread in looking), (
                "a thread waits for the message that another one took"
            )
    dist.barrier()


def _poll_until_ended(backend: MPIBackend) -> None:
    group = backend.process_group
    assert isinstance(group, MPIGroup)
    while backend.is_initialized:
        with contextlib.suppress(GroupEndedError):
            group.check_live()


def absent_ranks_are_awaited_no_longer_than_the_timeout() -> None:
    """This check is last, because it leaves the other ranks with a communicator that was never
    made."""
    if dist.get_rank() != 0:
        with _raises(
            DeadlineError, "connecting 4 MPI ranks took longer than connect_timeout=0.2 s"
        ):
            MPIBackend().initialize(connect_timeout=timedelta(milliseconds=200))
    dist.barrier()
    if dist.get_rank() == 0:  # so that MPI can end
        MPIBackend().initialize()


def a_process_of_mpiexec_can_be_a_rank_of_a_job() -> None:
    """Checks that no coordinator is needed (docs/explanation/backends.md#mpi)."""
    session = open_session()
    assert (session.rank, session.world_size, session.default_backend) == (
        dist.get_rank(),
        dist.get_world_size(),
        "mpi",
    )
    session.close()
    set_session(None)


class _raises:
    """Like pytest.raises, which is not available in these processes."""

    def __init__(self, kind: type[Exception], pattern: str) -> None:
        self._kind, self._pattern = kind, pattern

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> bool:
        assert error is not None, f"nothing was raised; expected {self._kind.__name__}"
        if not isinstance(error, self._kind):
            return False
        assert re.search(self._pattern, str(error)), str(error)
        return True


MPI_CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        backend_collectives,
        *CHECKS.values(),
        booleans_and_complex_numbers,
        non_contiguous_parts,
        a_subset_of_ranks_has_its_own_communicator,
        a_rank_or_size_other_than_mpis_is_refused,
        a_message_that_is_too_long_is_refused,
        a_process_of_mpiexec_can_be_a_rank_of_a_job,
        a_wait_ends_at_its_deadline,
        an_abort_reaches_waiting_ranks,
        an_abort_reaches_all_threads_that_poll_at_once,
        absent_ranks_are_awaited_no_longer_than_the_timeout,
    )
}


def run_checks() -> dict[str, str | None]:
    """Runs all checks and returns their outcomes. After a failure ranks may be out of step, so the
    remaining checks are not run."""
    dist.init_process_group("shoal_mpi", init_method="mpi://", timeout=timedelta(seconds=20))
    outcomes: dict[str, str | None] = {}
    for name, check in MPI_CHECKS.items():
        try:
            check()
            outcomes[name] = None
        except Exception:  # any error: the test reports it
            outcomes[name] = traceback.format_exc()
            break
    dist.destroy_process_group()
    return outcomes
