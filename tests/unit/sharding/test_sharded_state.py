"""Model and optimizer state stay equal to those of one process while they are split for one number
of ranks after another."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.elastic.contract.generation import topology_of
from shoal_worker.engine.state.parameter_groups import by_bytes
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.layout import mirror_stride
from shoal_worker.sharding.resharding import Cut, hold
from shoal_worker.sharding.sharded_state import ShardedState
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.state.fits import check_elementwise, takes_whole_tensors
from torch import nn

from tests.muon_and_adamw import MuonAndAdamW
from tests.unit.sharding.rank_threads import RankThread, run_ranks

torch.manual_seed(2)
_START = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)).double()
_INPUTS = torch.randn(9, 5, dtype=torch.float64)

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "momentum of some": lambda p: torch.optim.SGD(
        [{"params": p[:2], "momentum": 0.9}, {"params": p[2:], "lr": 0.1}], 0.05
    ),
    "fused momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.05, fused=True),
    "amsgrad of some": lambda p: torch.optim.Adam(
        [{"params": p[:3], "amsgrad": True}, {"params": p[3:]}], 0.05
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.05, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "LAMB": lambda p: shoal.optim.LAMB(p, 0.05, weight_decay=0.1),
    "RowWiseAdagrad": lambda p: shoal.optim.RowWiseAdagrad(p, 0.05),
    "Muon and AdamW": MuonAndAdamW,
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, 0.05)
        for name in ("NAdam", "RAdam", "Adamax", "Adadelta")
    },
}


class Rank:
    """The state of one rank, which trains on the whole batch."""

    def __init__(self, make_optimizer: Any) -> None:
        self.module = copy.deepcopy(_START)
        (group,) = by_bytes(self.module, cap=1 << 20)
        self.unit = Unit(
            group.name, group.parameters, group.names, stage=Stage.OPTIMIZER, wide=False
        )
        self.optimizer = make_optimizer(list(self.module.parameters()))
        self.execution = ShardedExecution(
            [(self.module, [self.unit])],
            RankThread(0, 1, [], threading.Barrier(1)),
            Stage.OPTIMIZER,
        )
        self.execution.reduces_in_backward = False
        self.state = ShardedState(self.module, self.execution, Stage.OPTIMIZER)
        whole = True if isinstance(self.optimizer, MuonAndAdamW) else None
        if takes_whole_tensors(self.optimizer, elementwise=False, whole_tensors=whole):
            self.state.keep_tensors_whole()
        self.state.use_optimizer(self.optimizer)

    def step(self, ranks: RankThread) -> None:
        self.execution._collectives = ranks
        self.execution.factor = 1.0 / ranks.world_size
        self.module(_INPUTS).square().mean().backward()
        self.execution.reduce_rest()
        mirror = self.unit.mirror
        if mirror.position is not None:
            mirror.gradient = ranks._exchange("mirror", self.unit.own.gradient)[mirror.position]
        for holding in self.unit.holdings:
            holding.hand_out(1.0, self.unit.touched)
        self.optimizer.step()
        self.execution.forget()
        self.execution.applied()
        self.state.committed()


def generation(number: int, world_size: int, ranks: RankThread) -> Any:
    group = SimpleNamespace(
        generation=SimpleNamespace(number=number, topology=topology_of(["h"] * world_size))
    )
    for name in ("rank", "world_size", "all_gather_integers", "all_to_all", "exchange"):
        setattr(group, name, getattr(ranks, name))
    return group


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_survives_dying_ranks(name: str) -> None:
    alone = copy.deepcopy(_START)
    reference = OPTIMIZERS[name](list(alone.parameters()))
    for _ in range(3):
        reference.zero_grad()
        alone(_INPUTS).square().mean().backward()
        reference.step()
    survivors = [Rank(OPTIMIZERS[name]) for _ in range(3)]

    def first(ranks: RankThread) -> None:
        own = survivors[ranks.rank]
        own.state.cut_whole(number=1, rank=ranks.rank, topology=topology_of(["h"] * 3))
        own.step(ranks)

    run_ranks(3, first)
    for number, gone in ((2, 1), (3, 0)):
        del survivors[gone]

        def after(ranks: RankThread, number: int = number) -> None:
            own = survivors[ranks.rank]
            own.execution._collectives = ranks
            own.state.reshard(generation(number, ranks.world_size, ranks))
            own.step(ranks)

        run_ranks(len(survivors), after)
    whole = survivors[0].state.assemble(LocalChannel())
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(whole["model"][key], value, rtol=0, atol=1e-12, msg=key)
    expected = reference.state_dict()["state"]
    assert whole["optimizer"]["state"].keys() == expected.keys()
    for index, values in expected.items():
        assert whole["optimizer"]["state"][index].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(
                whole["optimizer"]["state"][index][key],
                value,
                rtol=0,
                atol=1e-12,
                check_device=False,
            )


def test_rank_with_unsharded_state_replaces_the_shards_of_dead_ranks() -> None:
    survivors = [Rank(OPTIMIZERS["momentum"]) for _ in range(2)]
    # ranks 2 and 3 die before rank 1 has begun the step
    survivors[0].state.cut_whole(number=1, rank=0, topology=topology_of(["h"] * 4))

    def after(ranks: RankThread) -> None:
        own = survivors[ranks.rank]
        own.execution._collectives = ranks
        own.state.reshard(generation(2, 2, ranks))

    run_ranks(2, after)
    for own in survivors:
        assert own.state.cut is not None
        assert own.state.cut.world_size == 2
        for key, value in _START.state_dict().items():
            assert own.state.assemble(LocalChannel())["model"][key].equal(value)


def test_rank_keeps_its_previous_layout_after_a_failed_resharding() -> None:
    """After a failed resharding, a rank keeps its old cut, so the next resharding can start from
    it."""
    ranks_of_three = [Rank(OPTIMIZERS["momentum"]) for _ in range(3)]
    for rank, own in enumerate(ranks_of_three):
        own.state.cut_whole(number=1, rank=rank, topology=topology_of(["h"] * 3))
        incomplete = hold(own.state.units, own.state._state, own.state.cut, [{}])
        own.state._before = incomplete
        # two of its positions are on no rank
        own.state.cut = Cut(number=2, world_size=5, position=rank, mirrored=None)

    def again(ranks: RankThread) -> None:
        own = ranks_of_three[ranks.rank]
        own.execution._collectives = ranks
        own.state.reshard(generation(3, 3, ranks))
        assert own.state._before is not None
        assert own.state._before.cut.number == 1

    run_ranks(3, again)


def test_optimizer_that_has_already_stepped_is_refused() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adagrad([parameter])
    check_elementwise(optimizer, elementwise=False)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="has already taken steps"):
        check_elementwise(optimizer, elementwise=False)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abb" + "ccc", "aabbcc", "abbcc", "abcd"])
def test_mirror_is_on_another_host_unless_one_host_has_most_ranks(hosts: str) -> None:
    stride = mirror_stride(topology_of(list(hosts)))
    assert all(host != hosts[(rank + stride) % len(hosts)] for rank, host in enumerate(hosts))


@pytest.mark.parametrize(
    ("hosts", "together"), [("a", 1), ("aaa", 3), ("aaab", 2), ("baaa", 2), ("aab", 1)]
)
def test_as_few_mirrors_as_possible_are_on_their_shards_own_host(hosts: str, together: int) -> None:
    stride = mirror_stride(topology_of(list(hosts)))
    assert (
        sum(host == hosts[(rank + stride) % len(hosts)] for rank, host in enumerate(hosts))
        == together
    )
    assert len(hosts) == 1 or stride % len(hosts)
