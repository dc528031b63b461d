"""The remaining ranks of a mesh reshard the model after others have left. No failure during this
loses a shard that a living rank owns."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest
import shoal
import torch
from shoal_common.errors import MembershipChanged
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.session.worker_process import current_session

from tests.unit.worker_strategies import mesh_models as models

LEFT = [0, 2, 3]
SPARE = 2
EXCHANGES = 3
"""Exchanges in which the ranks report whether there are shards, report which shards they own, and
send them."""
USES = EXCHANGES + 4 + 1 + 1 + 1
"""Number of times that resharding uses the group: besides the exchanges, it connects four groups,
receives a seed, runs an all-reduce while the layers are laid out, and confirms that all ranks have
their shards."""


class NextGeneration:
    """The next generation of a launch, with the ranks `left`.

    over: number of the use of the group at which every rank loses the generation; None for never.
    """

    def __init__(
        self, launch: Group, members: Group, left: Sequence[int], number: int, over: int | None
    ) -> None:
        self.rank, self.world_size, self.broken, self.device = (
            members.rank,
            len(left),
            None,
            launch.device,
        )
        self.generation = dataclasses.replace(members.generation, number=number)
        self._launch, self._members, self._left, self._over = launch, members, left, over
        self._uses = 0

    def _use(self) -> None:
        self._uses += 1
        if self._uses == self._over:
            raise MembershipChanged("a peer is gone")

    def exchange(self, payload: bytes) -> list[bytes]:
        self._use()
        return self._members.exchange(payload)

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        self._use()
        return self._members.all_gather_integers(values)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> None:
        self._use()
        self._members.all_to_all(output, tensor, output_sizes, input_sizes)

    def subgroup(
        self, ranks: Sequence[int], name: str, division: Sequence[Sequence[int]] = ()
    ) -> NextGeneration | None:
        self._use()
        left = [self._left[rank] for rank in ranks]
        part = self._launch.subgroup(left, f"{name} of {self.generation.number}")
        return Part(self, part, left) if part is not None else None

    @property
    def process_group(self) -> Any:
        self._use()
        return self._members.process_group

    def abort(self, reason: str) -> None:
        """Does nothing: the launch continues."""


class Part(NextGeneration):
    def __init__(self, whole: NextGeneration, members: Group, left: Sequence[int]) -> None:
        super().__init__(whole._launch, members, left, whole.generation.number, None)
        self._whole = whole

    def _use(self) -> None:
        self._whole._use()


def test_failure_at_any_point_of_reassigning_ranks_loses_no_part_that_a_living_rank_holds() -> None:
    """A failure at any use of the group during resharding loses no shard. Rank 1 has left; rank 2
    receives the shard that only rank 3 still owns, and rank 3 becomes a spare."""

    def rank() -> Any:
        net = models.make()
        model, optimizer = shoal.as_distributed(
            net,
            torch.optim.AdamW(net.parameters(), 0.01),
            minimum_parameter_group_size=64,
            strategy="hybrid",
            tensor_parallel_size=2,
        )
        x, y = models.data()[:8]
        for _ in range(2):
            model.train_step(x, y, models.loss_of)
            optimizer.step()
            optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.local_shard.items()}
        launch = current_session().group
        assert launch is not None
        members = launch.subgroup(LEFT, "left")
        if members is None:
            return None
        for attempt in range(1, USES + 1):
            # A spare uses the group for the exchanges and once more to confirm. In between, the
            # other ranks connect groups and lay out the layers.
            over = min(attempt, EXCHANGES + 1) if members.rank == SPARE else attempt
            with pytest.raises(MembershipChanged, match="a peer is gone"):
                model.engine.reshard(
                    cast("Group", NextGeneration(launch, members, LEFT, 1 + attempt, over))
                )
            assert model.engine.is_sharded
            assert not model.engine.idle
        model.engine.reshard(cast("Group", NextGeneration(launch, members, LEFT, 2 + USES, None)))
        return before, dict(model.local_shard), model.engine.idle

    first, _, second, spare = shoal.launch(rank, world_size=4)
    assert not spare[1], "a spare owns no shard"
    assert [of[2] for of in (first, second, spare)] == [False, False, True]
    torch.testing.assert_close(first[1], first[0], rtol=0, atol=0)
    torch.testing.assert_close(second[1], spare[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero3"},
        {"strategy": "hsdp", "shard_size": 2},
        {"strategy": "hybrid", "data_parallel_strategy": "zero2"},
        {"strategy": "hybrid", "pipeline_parallel_size": 2},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_parts_of_a_leaving_rank_survive_the_death_of_the_only_other_holder(
    options: dict[str, Any],
) -> None:
    """The shards of a leaving rank survive if the only other rank with the same shards dies before
    the remaining ranks have resharded."""
    leaver, dead = 1, 3 if options.get("pipeline_parallel_size") or options.get("shard_size") else 2
    left = [rank for rank in range(4) if rank not in (leaver, dead)]

    def rank() -> Any:
        net = models.make()
        inner = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer = shoal.as_distributed(
            net, inner, minimum_parameter_group_size=64, **options
        )
        x, y = models.data()[:8]
        for _ in range(2):
            model.train_step(x, y, models.loss_of)
            optimizer.step()
            optimizer.zero_grad()
        expected = {"model": model.full_state_dict(), "optimizer": optimizer.state_dict()}
        launch = current_session().group
        assert launch is not None
        model.engine.keep_two_copies(launch, [leaver])
        members = launch.subgroup(left, "left")
        if members is None:
            return None
        model.engine.reshard(cast("Group", NextGeneration(launch, members, left, 2, None)))
        return expected, model.engine._held.assemble(members)

    results = shoal.launch(rank, world_size=4)
    for one in left:
        expected, assembled = results[one]
        assert assembled["model"].keys() == expected["model"].keys()
        for name, value in expected["model"].items():
            assert torch.equal(assembled["model"][name], value), name
        for number, own in expected["optimizer"]["state"].items():
            for key, value in own.items():
                assert torch.equal(
                    torch.as_tensor(assembled["optimizer"]["state"][number][key]),
                    torch.as_tensor(value),
                ), (number, key)


@pytest.mark.parametrize(
    ("options", "dead"),
    [({"strategy": "zero3"}, 0), ({"strategy": "hybrid", "pipeline_parallel_size": 2}, 3)],
    ids=["zero3", "pipeline"],
)
def test_copies_of_values_replaced_by_the_script_are_not_used(
    options: dict[str, Any], dead: int
) -> None:
    left = [rank for rank in range(4) if rank != dead]

    def rank() -> Any:
        net = models.make()
        inner = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer = shoal.as_distributed(
            net, inner, minimum_parameter_group_size=64, **options
        )
        x, y = models.data()[:8]
        for _ in range(2):
            before = {"model": model.full_state_dict(), "optimizer": optimizer.state_dict()}
            model.train_step(x, y, models.loss_of)
            optimizer.step()
            optimizer.zero_grad()
        launch = current_session().group
        assert launch is not None
        model.engine.keep_two_copies(launch, [dead])
        model.load_full(before["model"])
        optimizer.load_state_dict(before["optimizer"])
        members = launch.subgroup(left, "left")
        return None if members is None else (before, model.engine._held.assemble(members))

    results = shoal.launch(rank, world_size=4)
    for one in left:
        before, assembled = results[one]
        for name, value in before["model"].items():
            assert torch.equal(assembled["model"][name], value), name
        for number, own in before["optimizer"]["state"].items():
            for key, value in own.items():
                assert torch.equal(
                    torch.as_tensor(assembled["optimizer"]["state"][number][key]),
                    torch.as_tensor(value),
                ), (number, key)


def test_parts_from_before_a_reassignment_are_released() -> None:
    """Resharding frees the old parameters, although DTensor keeps every mesh that it has seen."""

    def rank() -> list[bool]:
        net = models.make()
        inner = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer = shoal.as_distributed(
            net, inner, minimum_parameter_group_size=64, strategy="tensor"
        )
        x, y = models.data()[:8]
        held = []
        for _ in range(2):
            model.train_step(x, y, models.loss_of)
            optimizer.step()
            optimizer.zero_grad()
            held.append(weakref.ref(inner.param_groups[0]["params"][0]))
            group = current_session().group
            assert group is not None
            model.engine.reshard(group)
        model.train_step(x, y, models.loss_of)
        optimizer.step()
        gc.collect()
        return [one() is None for one in held]

    assert shoal.launch(rank, world_size=2) == [[True, True]] * 2
