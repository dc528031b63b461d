"""Sharded training on several ranks equals training by one process on the whole batch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from shoal_common.errors import MembershipChanged, PreconditionError
from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.engine.state.parameter_groups import alike, by_bytes, by_modules
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.unit import Stage, Unit
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.sharding.rank_threads import RankThread, run_ranks

STEPS = 3
BATCH = 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Tied(nn.Module):
    """A small language model with a shared embedding and head, one checkpointed block, one frozen
    norm, and one unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index == 2 else block(x)
        return self.head(self.norm(x))


torch.manual_seed(1)
_START = Tied().double()


def make() -> Tied:
    """Returns a model with the same weights in every rank's thread, although threads share one
    random generator."""
    return copy.deepcopy(_START)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def alone(optimizer_class: Any) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def units_of(model: nn.Module, stage: Stage) -> list[tuple[nn.Module, list[Unit]]]:
    groups = (
        by_modules(model, [Block], at_least=0)
        if stage is Stage.PARAMETERS
        else by_bytes(model, cap=2000)
    )
    return [
        (
            g.module,
            [
                Unit(each.name, each.parameters, each.names, stage=stage, wide=False)
                for each in alike(g)
            ],
        )
        for g in groups
    ]


def train(
    ranks: RankThread,
    stage: Stage,
    optimizer_class: Any,
    *,
    micro_batches: Any = lambda rank: 1,
    prefetch: int = 1,
    watch: Any = lambda execution: None,
) -> tuple[dict[str, torch.Tensor], RankThread]:
    """Trains one rank. `micro_batches` returns the number of micro-batches of each rank. Returns
    the full trained state."""
    model = make()
    units = units_of(model, stage)
    execution = ShardedExecution(units, ranks, stage, prefetch=prefetch)
    watch(execution)
    for unit in execution.units:
        unit.cut(ranks.world_size, ranks.rank, None)
    execution.free_all()
    optimizer = optimizer_class([p for unit in execution.units for p in unit.own.pieces], lr=0.05)
    for step in range(STEPS):
        ranks.calls.clear()
        ranks.sent_bytes = 0
        mine = batch(step).tensor_split(ranks.world_size)[ranks.rank]
        counts = [micro_batches(rank) for rank in range(ranks.world_size)]
        for part in mine.tensor_split(counts[ranks.rank]):
            execution.factor = len(part) / BATCH
            execution.begin_passes()
            loss_of(model, part).backward()
            execution.end_passes()
        for _ in range(max(counts) - counts[ranks.rank]):
            execution.take_part()
        execution.reduce_rest()
        for unit in execution.units:
            present = torch.tensor(unit.touched, dtype=torch.float64)
            ranks.all_reduce_short(present)
            unit.own.hand_out(1.0, [bool(count) for count in present])
        optimizer.step()
        execution.forget()
        execution.applied()
    sent = ranks.sent_bytes
    execution.gather_all()
    ranks.sent_bytes = sent
    return copy.deepcopy(model.state_dict()), ranks


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", list(Stage))
def test_result_matches_one_process_on_the_whole_batch(
    stage: Stage, world_size: int, optimizer_class: Any
) -> None:
    expected = alone(optimizer_class)
    for trained, _ in run_ranks(world_size, lambda ranks: train(ranks, stage, optimizer_class)):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("counts", [[1, 1], [2, 1]], ids=["a batch each", "a rank without samples"])
def test_number_of_prefetched_blocks_changes_no_bit(counts: list[int]) -> None:
    def trained(ahead: int) -> list[dict[str, torch.Tensor]]:
        def body(ranks: RankThread) -> Any:
            return train(
                ranks,
                Stage.PARAMETERS,
                torch.optim.AdamW,
                micro_batches=lambda rank: counts[rank],
                prefetch=ahead,
            )

        return [state for state, _ in run_ranks(2, body)]

    expected = trained(1)
    for ahead in (0, 2, 3, 9):
        for state, own in zip(trained(ahead), expected, strict=True):
            assert all(torch.equal(state[name], own[name]) for name in own)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_no_more_blocks_are_prefetched_than_configured(ahead: int) -> None:
    most: list[int] = []

    def watch(execution: ShardedExecution) -> None:
        blocks = execution._blocks[1:]  # the outermost block stays gathered
        start = execution._start

        def started(units: Any) -> None:
            start(units)
            if len(units) == len(execution.units):
                return  # all are gathered at once for the state at the end
            most.append(
                sum(
                    any(unit._gathered or unit._gathering is not None for unit in block.units)
                    for block in blocks
                )
            )

        # records which blocks are gathered at each moment
        execution._start = started  # type: ignore[method-assign]

    run_ranks(
        2,
        lambda ranks: train(
            ranks,
            Stage.PARAMETERS,
            torch.optim.AdamW,
            prefetch=ahead,
            watch=watch if ranks.rank == 0 else id,
        ),
    )
    # between two blocks of a backward pass, one is about to be freed
    assert max(most) == min(3, 2 + ahead)


@pytest.mark.parametrize("stage", list(Stage))
def test_gradients_accumulate_over_several_backward_passes(stage: Stage) -> None:
    expected = alone(torch.optim.AdamW)
    for trained, _ in run_ranks(
        2, lambda ranks: train(ranks, stage, torch.optim.AdamW, micro_batches=lambda rank: 2)
    ):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_rank_with_fewer_micro_batches_takes_part_in_the_others_collectives(stage: Stage) -> None:
    expected = alone(torch.optim.AdamW)
    for trained, _ in run_ranks(
        3, lambda ranks: train(ranks, stage, torch.optim.AdamW, micro_batches=lambda rank: 4 - rank)
    ):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("stage", "times"), [(Stage.OPTIMIZER, 2), (Stage.GRADIENTS, 2), (Stage.PARAMETERS, 3)]
)
def test_bytes_on_the_wire_match_the_theory(stage: Stage, times: int) -> None:
    parameter_bytes = sum(
        p.numel() * p.element_size() for p in make().parameters() if p.requires_grad
    )
    for _, ranks in run_ranks(2, lambda ranks: train(ranks, stage, torch.optim.AdamW)):
        assert ranks.sent_bytes == pytest.approx(times * parameter_bytes / 2, rel=0.15), stage.name


def test_sharded_parameters_are_held_only_by_their_owners_between_steps() -> None:
    def held(ranks: RankThread) -> tuple[int, int]:
        model = make()
        units = units_of(model, Stage.PARAMETERS)
        execution = ShardedExecution(units, ranks, Stage.PARAMETERS)
        for unit in execution.units:
            unit.cut(ranks.world_size, ranks.rank, None)
        execution.free_all()
        execution.factor = 1.0
        loss_of(model, batch(0)).backward()
        with inside():
            whole = sum(p.untyped_storage().nbytes() for p in model.parameters())
        return whole, sum(piece.numel() for unit in execution.units for piece in unit.own.pieces)

    results = run_ranks(3, held)
    assert [whole for whole, _ in results] == [0, 0, 0]
    assert sum(own for _, own in results) == sum(p.numel() for p in make().parameters())


def test_sums_that_fail_after_an_aborted_step_are_forgotten_like_others() -> None:
    class Broken:
        def wait(self) -> bool:
            if given_up:
                raise MembershipChanged("the group is over")
            return True

    class Ranks(RankThread):
        def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Any:
            return Broken()

    given_up = False
    model = make()
    execution = ShardedExecution(
        units_of(model, Stage.GRADIENTS), Ranks(0, 1, [None], threading.Barrier(1)), Stage.GRADIENTS
    )
    for unit in execution.units:
        unit.cut(1, 0, None)
    execution.factor = 1.0
    loss_of(model, batch(0)).backward()
    given_up = True
    execution.forget()
    assert not any(unit.has_gradient() for unit in execution.units)


def test_collectives_of_an_aborted_pass_are_not_repeated_by_other_ranks() -> None:
    class Ranks(RankThread):
        lost = False

    ranks = Ranks(0, 1, [None], threading.Barrier(1))
    model = make()
    execution = ShardedExecution(units_of(model, Stage.PARAMETERS), ranks, Stage.PARAMETERS)
    for unit in execution.units:
        unit.cut(1, 0, None)
    execution.free_all()
    for lost in (False, True):
        ranks.lost, execution.factor = lost, 1.0
        passed = execution.passed
        execution.begin_passes()
        loss_of(model, batch(0)).backward()
        execution.end_passes()
        assert execution.passed
        assert not lost or execution.passed == passed


def test_a_backward_pass_outside_of_a_step_is_refused() -> None:
    model = make()
    execution = ShardedExecution(
        units_of(model, Stage.GRADIENTS),
        RankThread(0, 1, [None], threading.Barrier(1)),
        Stage.GRADIENTS,
    )
    execution.forget()
    with pytest.raises(PreconditionError, match=r"Call model\.train\(\)"):
        loss_of(model, batch(0)).backward()
