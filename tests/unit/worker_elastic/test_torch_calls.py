"""torch.distributed's calls with shoal.process_group() return what plain process groups return.
Errors are raised on all ranks alike."""

from __future__ import annotations

import pytest
import shoal
import torch
import torch.distributed as dist
from shoal_worker.torch_internals import c10d
from torch import nn


def _begin():
    net = nn.Linear(2, 1)
    return shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))


def _launched(run, world_size=3):
    def rank():
        _begin()
        group = shoal.process_group()
        assert group is shoal.process_group()
        return run(dist.get_rank(group), group)

    return shoal.launch(rank, world_size=world_size)


def test_group_has_shoals_ranks_and_size():
    assert _launched(
        lambda rank, group: (rank, dist.get_world_size(group), dist.get_process_group_ranks(group))
    ) == [(rank, 3, [0, 1, 2]) for rank in range(3)]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, [6, 60]),
        (dist.ReduceOp.AVG, [2, 20]),
        (dist.ReduceOp.MAX, [3, 30]),
        (dist.ReduceOp.MIN, [1, 10]),
        (dist.ReduceOp.PRODUCT, [6, 6000]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_reduce_is_in_place(op, expected, dtype):
    def run(rank, group):
        values = torch.tensor([rank + 1, 10 * (rank + 1)], dtype=dtype)
        work = dist.all_reduce(values, op, group=group, async_op=True)
        assert work.is_completed()
        assert work.wait()
        return values

    for result in _launched(run):
        assert result.dtype == dtype
        assert result.tolist() == torch.tensor(expected, dtype=dtype).tolist()


def test_every_collective_matches_torchs_documentation():
    def run(rank, group):
        parts = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([rank, rank]), group=group)
        whole = torch.zeros(6)
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)), group=group)
        root = torch.full((2, 2), rank)
        dist.broadcast(root, src=1, group=group)
        reduced = torch.tensor([rank + 1])
        dist.reduce(reduced, dst=2, group=group)
        gathered = [torch.zeros(1) for _ in range(3)] if rank == 0 else None
        dist.gather(torch.tensor([float(rank)]), gathered, dst=0, group=group)
        mine = torch.zeros(1)
        dist.scatter(
            mine,
            [torch.tensor([10.0 * n]) for n in range(3)] if rank == 1 else None,
            src=1,
            group=group,
        )
        share = torch.zeros(1)
        dist.reduce_scatter_tensor(share, torch.arange(3.0), group=group)
        swapped = torch.zeros(3)
        dist.all_to_all_single(swapped, torch.arange(3.0) + 10 * rank, group=group)
        objects = [None] * 3
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
        words = [f"of {rank}", rank]
        dist.broadcast_object_list(words, src=2, group=group)
        dist.barrier(group=group)
        values = (parts, whole, root, mine, share, swapped)
        return (
            [
                v.tolist() if isinstance(v, torch.Tensor) else [e.tolist() for e in v]
                for v in values
            ],
            reduced.item(),
            gathered,
            objects,
            words,
        )

    for rank, (values, reduced, gathered, objects, words) in enumerate(_launched(run)):
        parts, whole, root, mine, share, swapped = values
        assert parts == [[0, 0], [1, 1], [2, 2]]
        assert whole == [0, 0, 1, 1, 2, 2]
        assert root == [[1, 1], [1, 1]]
        assert reduced == (6 if rank == 2 else rank + 1)
        assert (
            (gathered == [torch.tensor([float(n)]) for n in range(3)])
            if rank == 0
            else gathered is None
        )
        assert (mine, share, swapped) == (
            [10.0 * rank],
            [3.0 * rank],
            [rank, 10.0 + rank, 20.0 + rank],
        )
        assert objects == [{"rank": n, "text": "x" * n} for n in range(3)]
        assert words == ["of 2", 2]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda rank, g: dist.all_reduce(torch.zeros(1 + rank), group=g),
            shoal.InvalidRequestError,
            "rank 0 passed inputs .* rank 1 passed",
        ),
        (
            lambda rank, g: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND, group=g),
            shoal.ConfigurationError,
            "ReduceOp.BAND: .* SUM, AVG",
        ),
        (
            lambda rank, g: dist.all_gather([torch.zeros(1)] * 2, torch.zeros(1), group=g),
            shoal.InvalidRequestError,
            "one for each of 3 ranks",
        ),
        (
            lambda rank, g: dist.all_gather(
                [torch.zeros(1) for _ in range(3)], torch.zeros(1 + rank), group=g
            ),
            shoal.InvalidRequestError,
            "rank 0 expects float32.* from rank 1",
        ),
        (
            lambda rank, g: dist.all_reduce(
                torch.zeros(1, dtype=(torch.float32, torch.int64)[rank % 2]), group=g
            ),
            shoal.InvalidRequestError,
            "int64",
        ),
        (
            lambda rank, g: dist.send(torch.zeros(1), (rank + 1) % 3, group=g),
            shoal.PreconditionError,
            "send .*cannot be repeated after a fault",
        ),
        (
            lambda rank, g: dist.recv(torch.zeros(1), (rank + 1) % 3, group=g),
            shoal.PreconditionError,
            "recv .*cannot be repeated after a fault",
        ),
    ],
)
def test_invalid_call_is_one_error_on_all_ranks(call, kind, message):
    def run(rank, group):
        with pytest.raises(kind, match=message):
            call(rank, group)
        dist.all_reduce(total := torch.ones(1), group=group)
        return total.item()

    assert _launched(run) == [3, 3, 3], "the ranks continue together after the error"


def test_rank_with_a_mismatched_call_fails_the_call_on_all_ranks():
    def run(rank, group):
        if rank == 1:
            group._asked = (1, 4)  # the state after a fault
        values = torch.ones(1)
        with pytest.raises(
            shoal.MembershipChanged, match="Call get_rank and get_world_size"
        ) as result:
            dist.all_reduce(values, group=group)
        assert result.value.reason == "RANKS_CHANGED"
        assert values.item() == 1
        dist.barrier(group=group)
        assert dist.get_world_size(group) == 3
        dist.all_reduce(values, group=group)
        return values.item()

    assert _launched(run) == [3, 3, 3]


def test_call_inside_a_step_or_a_backward_pass_is_refused():
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            dist.all_reduce(gradient, group=shoal.process_group())
            return gradient

    def rank():
        model, _ = _begin()
        group = shoal.process_group()
        with pytest.raises(shoal.PreconditionError, match="in a backward pass"):
            Backward.apply(torch.ones(1, requires_grad=True)).sum().backward()
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.zeros(8, 2)), global_batch_size=4
        )
        batches = iter(loader)
        (rows,) = next(batches)
        model(rows).sum().backward()
        with pytest.raises(
            shoal.PreconditionError,
            match=r"all_reduce was called inside a step; call it after optimizer\.step\(\)",
        ):
            dist.all_reduce(torch.ones(1), group=group)

    shoal.launch(rank, world_size=2)


@pytest.mark.usefixtures("fresh_session")
def test_process_without_a_job_is_a_world_of_one():
    group = shoal.process_group()
    try:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
        dist.all_reduce(values := torch.tensor([3.0]), group=group)
        assert values.item() == 3
        dist.all_gather_object(objects := [None], "x", group=group)
        assert objects == ["x"]
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("fresh_session")
def test_torchs_dataloader_does_not_count_as_a_query_of_the_script():
    group = shoal.process_group()
    try:
        assert list(torch.utils.data.DataLoader(range(4), batch_size=4))
        assert group._asked is None
        dist.get_world_size()
        assert group._asked == (0, 1)
    finally:
        dist.destroy_process_group()


def test_scripts_own_default_group_is_refused():
    def rank():
        _begin()
        world = c10d._world
        default = world.default_pg
        assert default is not None, "a launch has a default group with the same ranks"
        world.default_pg = dist.ProcessGroup(shoal.world_size() - 1 - shoal.rank(), 2)
        try:
            with pytest.raises(
                shoal.PreconditionError, match=r"Leave out torch\.distributed\.init_process_group"
            ) as result:
                shoal.process_group()
        finally:
            world.default_pg = default
        return result.value.reason

    assert shoal.launch(rank, world_size=2) == ["DEFAULT_GROUP_EXISTS"] * 2


def test_metric_of_torchmetrics_accepts_the_group():
    # imported here because only this test needs it, and it takes more than a second
    import torchmetrics

    predictions, targets = torch.arange(20) % 4, torch.arange(20) % 3

    def run(rank, group):
        metric = torchmetrics.classification.MulticlassAccuracy(
            4, average="micro", process_group=group
        )
        kept = torchmetrics.CatMetric(process_group=group)
        mine = slice(0, 12) if rank == 0 else slice(12, 20)
        metric.update(predictions[mine], targets[mine])
        kept.update(predictions[mine].float())
        return float(metric.compute()), kept.compute().tolist()

    expected = (pytest.approx(float((predictions == targets).float().mean())), predictions.tolist())
    assert _launched(run, world_size=2) == [expected] * 2
