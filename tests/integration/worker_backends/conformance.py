"""Conformance checks of backends, which each rank runs.

They cover the collectives of CommunicationBackend, those of torch.distributed, and torch's
unmodified parallel code (DDP, FSDP2, DTensor, pipelining), compared with one process on the full
batch. A check raises on the rank where it fails. test_conformance.py runs them on threads and on
forked processes, test_mpi.py with mpiexec.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from shoal_common.errors import InvalidRequestError
from shoal_worker.backends import CommunicationBackend, ReduceOp
from shoal_worker.torch_internals import VERSION
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)

# --- torch's functions under their names since torch 2.13, and under the names before that

all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_single_coalesced: Any = getattr(
    funcol, "all_gather_single_coalesced", funcol.all_gather_into_tensor_coalesced
)
reduce_scatter_single_coalesced: Any = getattr(
    funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced
)
all_gather_single_autograd: Any = getattr(
    funcol, "all_gather_single_autograd", funcol.all_gather_tensor_autograd
)

# --- CommunicationBackend


def check_backend(backend: CommunicationBackend) -> None:
    """Checks every collective, dtype and op, both blocking and asynchronous."""
    for dtype in DTYPES:
        _check_reductions(backend, dtype)
        _check_movements(backend, dtype)
    _check_short_sums(backend)
    _check_halves(backend)
    _check_large(backend)
    _check_memory(backend)
    _check_point_to_point(backend)
    backend.barrier()
    backend.barrier(async_op=True).wait()
    assert backend.is_initialized


def _everybodys(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of shape (ranks, 2 * ranks, 3) with integers from 1 to 3, whose sums and
    products over four ranks are exact in every dtype."""
    return torch.randint(
        1, 4, (size, 2 * size, 3), generator=torch.Generator().manual_seed(size)
    ).to(dtype)


def _check_reductions(backend: CommunicationBackend, dtype: torch.dtype) -> None:
    size, rank = backend.world_size, backend.rank
    given = _everybodys(size, dtype)
    expected = {
        ReduceOp.SUM: given.double().sum(0),
        ReduceOp.PRODUCT: given.double().prod(0),
        ReduceOp.MIN: given.double().amin(0),
        ReduceOp.MAX: given.double().amax(0),
    }
    if dtype.is_floating_point:
        expected[ReduceOp.AVERAGE] = given.double().mean(0)
    for op, whole in expected.items():
        for async_op in (False, True):
            reduced = given[rank].clone()
            backend.all_reduce(reduced, op, async_op=async_op).wait()
            torch.testing.assert_close(
                reduced, whole.to(dtype), msg=lambda text, op=op: f"all_reduce {op} {dtype}: {text}"
            )
            part = torch.empty(2, 3, dtype=dtype)
            backend.reduce_scatter(part, given[rank].clone(), op, async_op=async_op).wait()
            torch.testing.assert_close(
                part,
                whole[2 * rank : 2 * rank + 2].to(dtype),
                msg=lambda text, op=op: f"reduce_scatter {op} {dtype}: {text}",
            )


def _check_short_sums(backend: CommunicationBackend) -> None:
    """Checks that the results of `all_reduce_short` and `sum_numbers` are bit for bit equal on all
    ranks, for numbers whose sum depends on the order."""
    for numel in (1, 20, 3000):
        given = torch.rand(
            backend.world_size,
            numel,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(numel),
        )
        summed = given[backend.rank].clone()
        backend.all_reduce_short(summed)
        torch.testing.assert_close(summed, given.sum(0))
        numbers = torch.tensor(
            backend.sum_numbers(given[backend.rank].tolist()), dtype=torch.float64
        )
        assert torch.equal(numbers, summed), "sum_numbers and all_reduce_short differ"
        everybodys = torch.empty(backend.world_size * numel, dtype=torch.float64)
        backend.all_gather(everybodys, summed)
        assert torch.equal(everybodys.view(-1, numel), summed.expand(backend.world_size, numel)), (
            "the ranks' sums differ"
        )


def _check_movements(backend: CommunicationBackend, dtype: torch.dtype) -> None:
    size, rank = backend.world_size, backend.rank
    given = _everybodys(size, dtype)
    for async_op in (False, True):
        gathered = torch.empty(size, 2 * size, 3, dtype=dtype)
        backend.all_gather(gathered, given[rank].clone(), async_op=async_op).wait()
        assert torch.equal(gathered, given)
        for source in range(size):
            copied = given[rank].clone()
            backend.broadcast(copied, source, async_op=async_op).wait()
            assert torch.equal(copied, given[source])
            part = torch.empty(2, 3, dtype=dtype)
            backend.scatter(
                part, given[rank].clone() if rank == source else None, source, async_op=async_op
            ).wait()
            assert torch.equal(part, given[source, 2 * rank : 2 * rank + 2])
        swapped = torch.empty(2 * size, 3, dtype=dtype)
        backend.all_to_all(swapped, given[rank].clone(), async_op=async_op).wait()
        assert torch.equal(swapped, given[:, 2 * rank : 2 * rank + 2].reshape(-1, 3))
        # Rank r sends r + 1 rows to each rank.
        rows = [source + 1 for source in range(size)]
        received = torch.empty(sum(rows), 3, dtype=dtype)
        sent = torch.full((size * (rank + 1), 3), rank, dtype=dtype)
        backend.all_to_all(received, sent, rows, [rank + 1] * size, async_op=async_op).wait()
        assert received[:, 0].tolist() == [
            source for source in range(size) for _ in range(source + 1)
        ]


def _check_halves(backend: CommunicationBackend) -> None:
    """Checks that half precision is summed in float32 and rounded once, so that small parts are not
    lost one by one."""
    size, rank = backend.world_size, backend.rank
    parts = torch.full((size * 64,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    part = torch.empty(64, dtype=torch.bfloat16)
    backend.reduce_scatter(part, parts)
    assert part.eq(torch.tensor(256.0 + size - 1).bfloat16()).all(), part


def _check_large(backend: CommunicationBackend) -> None:
    """Checks sizes at which backends use other algorithms, with several collectives in flight, and
    that a reduce-scatter adds in the order of ranks, bit for bit."""
    size, rank = backend.world_size, backend.rank
    given = torch.randn(size, size, 50_001, generator=torch.Generator().manual_seed(size))
    parts = [torch.empty(50_001) for _ in range(3)]
    scattered = [backend.reduce_scatter(part, given[rank].clone(), async_op=True) for part in parts]
    whole = torch.empty(size, size, 50_001)
    gathered = backend.all_gather(whole, given[rank].clone(), async_op=True)
    expected = given[0, rank].clone()
    for other in range(1, size):
        expected += given[other, rank]
    for handle in (gathered, *scattered):
        handle.wait()
        assert handle.is_completed()
    assert torch.equal(whole, given)
    assert all(torch.equal(part, expected) for part in parts)


def _check_memory(backend: CommunicationBackend) -> None:
    """Checks that the memory of tensors can be released afterwards, as fully sharded strategies
    do."""
    whole, part = torch.ones(4 * backend.world_size), torch.ones(4)
    backend.all_reduce(whole)
    backend.broadcast(whole, 0)
    backend.all_gather(whole, part)
    backend.reduce_scatter(part, whole)
    for tensor in (whole, part):
        tensor.untyped_storage().resize_(0)


def _check_point_to_point(backend: CommunicationBackend) -> None:
    """Sends in a ring, out of order: tags tell the messages apart."""
    size, rank = backend.world_size, backend.rank
    following, before = (rank + 1) % size, (rank - 1) % size
    handles = [
        backend.send(torch.full((4,), 10.0 * rank + tag), following, tag, async_op=True)
        for tag in (1, 2)
    ]
    second, first = torch.empty(4), torch.empty(4)
    backend.recv(second, before, 2)
    backend.recv(first, before, 1)
    for handle in handles:
        handle.wait()
    assert first.tolist() == [10.0 * before + 1] * 4
    assert second.tolist() == [10.0 * before + 2] * 4
    # Larger than any library sends before the receiver is ready.
    large = torch.full((1 << 18,), float(rank))
    sending = backend.send(large, following, async_op=True)
    received = torch.empty(1 << 18)
    backend.recv(received, before)
    sending.wait()
    assert received.eq(before).all()


# --- torch.distributed, on the default group


def _mine(shape: Sequence[int] = (4,)) -> torch.Tensor:
    return torch.full(tuple(shape), dist.get_rank() + 1.0)


def collectives_by_torchs_names() -> None:
    """Checks the functions of torch.distributed."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numbers = [float(one + 1) for one in range(size)]
    total = _mine()
    dist.all_reduce(total)
    assert total.tolist() == [sum(numbers)] * 4
    total = _mine()
    dist.reduce(total, dst=size - 1)
    assert rank != size - 1 or total.tolist() == [sum(numbers)] * 4
    gathered = [torch.empty(4) for _ in range(size)]
    dist.all_gather(gathered, _mine())
    assert [one[0].item() for one in gathered] == numbers
    collected = [torch.empty(4) for _ in range(size)] if rank == 1 else None
    dist.gather(_mine(), collected, dst=1)
    assert collected is None or [one[0].item() for one in collected] == numbers
    part = torch.empty(2)
    dist.scatter(
        part, [torch.full((2,), 7.0 * one) for one in range(size)] if rank == 0 else None, src=0
    )
    assert part.tolist() == [7.0 * rank] * 2
    dist.reduce_scatter(
        part, [torch.full((2,), float(one * rank)) for one in range(size)], op=dist.ReduceOp.MAX
    )
    assert part.tolist() == [float(rank * (size - 1))] * 2
    if VERSION >= (2, 12):  # torch 2.11's Gloo has no list variants
        outputs = [torch.empty(1) for _ in range(size)]
        dist.all_to_all(outputs, [torch.tensor([10.0 * rank + one]) for one in range(size)])
        assert [one.item() for one in outputs] == [10.0 * one + rank for one in range(size)]
    large = [torch.empty(100_000) for _ in range(size)]
    dist.all_gather(large, _mine((100_000,)))
    assert [one.mean().item() for one in large] == numbers
    dist.barrier()


def futures_hold_the_result() -> None:
    """Checks the futures for which DDP's hooks wait."""
    total = _mine()
    future = dist.all_reduce(total, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * sum(range(1, dist.get_world_size() + 1))] * 4
    whole = torch.empty(dist.get_world_size(), 100_000)
    future = all_gather_single(whole, _mine((1, 100_000)), async_op=True).get_future()
    sums = future.then(lambda done: [one.sum().item() / 100_000 for one in done.value()])
    assert sums.wait() == [sum(range(1, dist.get_world_size() + 1))]


def single_tensor_forms() -> None:
    """Checks all_gather_single and reduce_scatter_single as FSDP2 calls them; the input may be a
    view of the output."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(size, 3)
    whole[rank] = rank + 1.0
    all_gather_single(whole, whole[rank : rank + 1])
    assert whole[:, 0].tolist() == [one + 1.0 for one in range(size)]
    parts = torch.arange(2.0 * size) + rank
    reduce_scatter_single(parts[2 * rank : 2 * rank + 2], parts)
    assert parts[2 * rank : 2 * rank + 2].tolist() == [
        size * (2.0 * rank + one) + sum(range(size)) for one in (0, 1)
    ]


def coalesced_forms() -> None:
    """Checks the coalesced forms into which functional collectives convert lists."""
    size, rank = dist.get_world_size(), dist.get_rank()
    one, two = funcol.all_reduce_coalesced([_mine(), _mine((2, 2))], "sum", dist.group.WORLD)
    assert one[0] == two[0, 0] == sum(range(1, size + 1))
    one, two = all_gather_single_coalesced([_mine((2,)), _mine((1, 3))], dist.group.WORLD)
    assert one.tolist() == [n + 1.0 for n in range(size) for _ in range(2)]
    assert two[:, 0].tolist() == [n + 1.0 for n in range(size)]
    one, two = reduce_scatter_single_coalesced(
        [torch.arange(float(size)), torch.ones(2 * size, 2)], "sum", [0, 0], dist.group.WORLD
    )
    assert one.tolist() == [size * float(rank)]
    assert two.eq(size).all()
    assert two.shape == (2, 2)


def sparse_tensors() -> None:
    """Sums the gradients of sparse embeddings, whose rows differ between ranks. A backend without
    sparse sums raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.sparse_coo_tensor(
        [[rank, size]], torch.ones(2, 3), (size + 1, 3), check_invariants=True
    ).coalesce()
    if dist.get_backend() == "shoal_mpi":
        refusal = ""
        try:
            dist.all_reduce(rows)
        except InvalidRequestError as error:
            refusal = str(error)
        assert "create embeddings with sparse=False" in refusal
        return
    dist.all_reduce(rows)
    assert rows.to_dense().tolist() == [[1.0] * 3] * size + [[float(size)] * 3]


def functional_collectives() -> None:
    """Checks the functional collectives that DTensor uses, with their gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    assert (
        funcol.all_reduce(_mine(), "avg", dist.group.WORLD).tolist()
        == [sum(range(1, size + 1)) / size] * 4
    )
    assert funcol.broadcast(_mine(), 1, dist.group.WORLD).tolist() == [2.0] * 4
    swapped = funcol.all_to_all_single(
        torch.arange(float(size)) + 10 * rank, None, None, dist.group.WORLD
    )
    assert swapped.tolist() == [10.0 * one + rank for one in range(size)]
    leaf = torch.ones(2, requires_grad=True)
    gathered = all_gather_single_autograd(leaf * (rank + 1), 0, dist.group.WORLD)
    (gathered * torch.arange(2.0 * size)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [size * (rank + 1) * (2.0 * rank + one) for one in (0, 1)]


def transfers() -> None:
    """Checks isend and irecv in batches, with tags, and from any rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    following, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _mine(), following), dist.P2POp(dist.irecv, received, before)]
    )
    for work in works:
        work.wait()
    assert received[0] == before + 1
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            value = torch.empty(1)
            source = dist.recv(value, tag=5)
            assert value.item() == source
            senders.add(source)
        assert senders == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=5)


def objects() -> None:
    """Checks Python objects of different sizes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everybodys: list[Any] = [None] * size
    dist.all_gather_object(everybodys, {"rank": rank, "padding": "x" * rank})
    assert [one["rank"] for one in everybodys] == list(range(size))
    reported = ["hello" if rank == 0 else None]
    dist.broadcast_object_list(reported, src=0)
    assert reported == ["hello"]


def sub_groups() -> None:
    """Checks groups of some of the ranks at the same time, and the axes of a mesh."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([one]) for one in range(size)] + [
        dist.new_group(list(reversed(range(size))))
    ]
    alone = _mine()
    dist.all_reduce(alone, group=groups[rank])
    assert alone[0] == rank + 1
    if size < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = _mine(), _mine()
    dist.all_reduce(row, group=mesh.get_group("columns"))
    dist.all_reduce(column, group=mesh.get_group("rows"))
    assert row[0] == (3 if rank < 2 else 7)
    assert column[0] == (4 if rank % 2 == 0 else 6)


# --- torch's parallel code


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator).double(), torch.randn(
        8, 8, generator=generator
    ).double()


def _share() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = _batch()
    size, rank = dist.get_world_size(), dist.get_rank()
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def _train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _assert_trained_as_alone(model: nn.Module) -> None:
    alone = _net()
    _train(alone, *_batch())
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-10, atol=1e-12)


def data_parallel() -> None:
    """Trains with DDP."""
    model = DistributedDataParallel(_net())
    _train(model, *_share())
    _assert_trained_as_alone(model)


def fully_sharded() -> None:
    """Trains with nested FSDP2 modules."""
    model, mesh = _net(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, *_share())
    _assert_trained_as_alone(model)


def fully_sharded_in_half_precision() -> None:
    """Trains with FSDP2, with parameters and gradients sent as bfloat16."""
    model, mesh = _net().float(), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    inputs, targets = _share()
    nn.functional.mse_loss(model(inputs.float()), targets.bfloat16()).backward()
    alone = _net()
    nn.functional.mse_loss(alone(_batch()[0]), _batch()[1]).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad.full_tensor().double(), expected.grad, rtol=0.1, atol=0.02
        )


def hybrid_sharded() -> None:
    """Trains with FSDP2 on a mesh of two axes."""
    model = _net()
    fully_shard(
        model,
        mesh=init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
        ),
    )
    _train(model, *_share())
    _assert_trained_as_alone(model)


def tensor_parallel() -> None:
    """Trains with parallelize_module, and redistributes a DTensor."""
    size = dist.get_world_size()
    model, mesh = _net(), init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _train(model, *_batch())
    _assert_trained_as_alone(model)
    whole = torch.arange(4.0 * size * size).view(2 * size, 2 * size)
    sharded = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert torch.equal(sharded.to_local(), whole[:, 2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    assert torch.equal(sharded.full_tensor(), whole)


def pipeline_parallel() -> None:
    """Runs two schedules over one stage per rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(size)]
    inputs, targets = _batch()
    nn.functional.mse_loss(nn.Sequential(*layers)(inputs), targets).backward()
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        mine = copy.deepcopy(layers[rank])
        mine.zero_grad()
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        schedule.step(
            *([inputs] if rank == 0 else []), **({"target": targets} if rank == size - 1 else {})
        )
        for found, expected in zip(mine.parameters(), layers[rank].parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def distributed_checkpoint() -> None:
    """Saves a DCP checkpoint in the background, with its own group, and loads it."""
    group = dist.new_group(list(range(dist.get_world_size())))
    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with tempfile.TemporaryDirectory() as own:
        directory = [own]
        dist.broadcast_object_list(directory, src=0)
        state = {"model": model.state_dict()}
        saving = dcp.async_save(state, checkpoint_id=directory[0], process_group=group)
        dist.barrier()
        saving.result()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(state, checkpoint_id=directory[0])
        for found, expected in zip(model.parameters(), _net().parameters(), strict=True):
            assert torch.equal(found.full_tensor(), expected)
        dist.barrier()


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        collectives_by_torchs_names,
        futures_hold_the_result,
        single_tensor_forms,
        coalesced_forms,
        sparse_tensors,
        functional_collectives,
        transfers,
        objects,
        sub_groups,
        data_parallel,
        fully_sharded,
        fully_sharded_in_half_precision,
        hybrid_sharded,
        tensor_parallel,
        pipeline_parallel,
        distributed_checkpoint,
    )
}
"""Checks of torch's interface by name. They expect an even number of ranks."""


def failures() -> dict[str, str]:
    """Runs all checks and returns those that failed on this rank, with their errors. After a
    failure ranks may be out of step, so the remaining checks are not run."""
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # any error: the test reports it
            return {name: traceback.format_exc()}
    return {}
