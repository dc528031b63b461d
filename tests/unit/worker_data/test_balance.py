"""Micro-batches dealt in proportion to the ranks' speeds."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.data import balance
from shoal_worker.data.balance import Times, agreed_costs, contribution, divided, exchanges_after
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Placement
from shoal_worker.settings import WorkerSettings

RANKS = 3


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 4.0), (3.0, 1.0, 1.5), (0.01, 7.0, 0.3)])
@pytest.mark.parametrize("items", range(14))
def test_no_other_division_finishes_sooner(items, costs):
    parts = divided(items, costs)
    assert sum(parts) == items
    least = 1 if items >= len(costs) else 0
    assert min(parts) >= least
    others = (
        each
        for each in itertools.product(range(least, items + 1), repeat=len(costs))
        if sum(each) == items
    )
    assert _slowest(parts, costs) == pytest.approx(min(_slowest(each, costs) for each in others))


def _slowest(parts, costs):
    return max(n * cost for n, cost in zip(parts, costs, strict=True))


def test_equal_costs_give_equal_parts_with_the_larger_ones_first():
    assert divided(10, (0.3, 0.3, 0.3, 0.3)) == (3, 3, 2, 2)


def test_many_micro_batches_are_divided_at_once():
    costs = tuple(1.0 + rank % 5 for rank in range(2000))
    parts = divided(1_000_000, costs)
    assert sum(parts) == 1_000_000
    assert parts[0] == pytest.approx(5 * parts[4], rel=0.02)


def _summed(*all_times):
    words = [contribution(times, rank, len(all_times)) for rank, times in enumerate(all_times)]
    return [sum(column) for column in zip(*words, strict=True)]


def test_costs_are_the_measured_times():
    measured = [Times(0.5, None), Times(0.25, None)]
    assert agreed_costs(_summed(*measured), 2) == (0.5, 0.25)


def test_nothing_is_agreed_until_every_rank_has_timed_a_step():
    assert agreed_costs(_summed(Times(0.5, None), Times(None, None)), 2) is None


def test_configured_speed_replaces_all_measured_times():
    assert agreed_costs(_summed(Times(0.5, None), Times(0.1, 0.25)), 2) == (1.0, 4.0)


def test_ranks_that_share_a_part_are_averaged():
    one, other = contribution(Times(0.2, None), 0, 1), contribution(Times(0.4, None), 0, 1)
    summed = [a + b for a, b in zip(one, other, strict=True)]
    assert agreed_costs(summed, 1) == (pytest.approx(0.3),)


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "fast"])
def test_speed_that_cannot_be_exchanged_is_refused(value, monkeypatch):
    monkeypatch.setenv("SHOAL_SPEED", value)
    with pytest.raises(ConfigurationError, match="SHOAL_SPEED"):
        WorkerSettings.load()


def test_a_sum_has_the_same_bits_in_every_order():
    words = [contribution(Times(0.1 * (rank + 1) / 3, None), 0, 1) for rank in range(7)]
    sums = {sum(word[0] for word in order) for order in itertools.permutations(words, 7)}
    assert len(sums) == 1


def test_exchanges_become_less_frequent():
    assert [n for n in range(50) if exchanges_after(n)] == [4, 8, 16, 32, 48]


# ---------------------------------------------------------------------------- loaders of one world


class Clock:
    """Time that passes only when a rank works."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(balance.time, "monotonic", clock.monotonic)
    return clock


class World:
    """Ranks that run a loop over micro-batches in turn: rank r works for `seconds[r]` on each.
    `round_steps`: number of steps that each rank takes alone before the ranks exchange anything;
    None: the ranks take all steps together."""

    def __init__(
        self,
        make_rank,
        clock,
        seconds,
        *,
        balance=True,
        round_steps=None,
        least_samples=1,
        micro_batch_size=2,
    ):
        self.seconds, self.clock, self.generation = seconds, clock, 1
        self.round_steps, self.steps = round_steps, 0
        self.ranks = [
            make_rank(
                lambda: ElasticDataLoader(
                    torch.arange(24 * 40),
                    global_batch_size=24,
                    micro_batch_size=micro_batch_size,
                    balance=balance,
                ),
                Placement(
                    generation=1,
                    rank=rank,
                    world_size=len(seconds),
                    least_samples=least_samples,
                ),
            )
            for rank in range(len(seconds))
        ]
        self.sent = []
        for rank in self.ranks:
            rank.session.sum_numbers = self.sent.append if round_steps is None else None
            rank.session.steps_alone = round_steps is not None
        self.loops = [None for _ in self.ranks]

    def step(self):
        """Runs a step on all ranks. Returns the number of each rank's micro-batches. Samples are
        checked to be complete."""
        counts, samples = [], []
        for place, rank in enumerate(self.ranks):
            with rank.session.current():
                if self.loops[place] is None:
                    self.loops[place] = rank.loader.steps()
                step = next(self.loops[place])
                counts.append(len(step))
                for batch in step:
                    self.clock.now += self.seconds[place]
                    samples += batch.tolist()
        if self.sent:
            summed = [sum(column) for column in zip(*self.sent, strict=True)]
            self.sent.clear()
            for rank in self.ranks:
                # each rank would have received the sum within its step
                own = rank.loader._iterations._delivery._balance
                costs = agreed_costs(summed, len(self.ranks))
                if costs is not None:
                    current = rank.loader._supply.current
                    own._adopt(costs, current, rank.loader.name, own._micro_batches(current))
        self.steps += 1
        summed = None
        if self.round_steps is not None and self.steps % self.round_steps == 0:
            offers = [rank.session.offered for rank in self.ranks]
            summed = [sum(column) for column in zip(*offers, strict=True)]
        for rank in self.ranks:
            rank.commit(summed)
        assert len(samples) == len(set(samples)) == 24
        return counts

    def change_generation(self):
        """Forms the next generation of the same ranks."""
        self.generation += 1
        for rank in self.ranks:
            old = rank.session.placement
            rank.session.placement = Placement(
                generation=self.generation, rank=old.rank, world_size=old.world_size
            )


def test_a_slow_rank_gets_fewer_micro_batches_after_the_first_exchange(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0))
    counts = [world.step() for _ in range(20)]
    assert counts[:4] == [[4, 4, 4]] * 4
    assert counts[4:] == [[5, 5, 2]] * 16 or counts[4:] == [[6, 5, 1]] * 16
    assert _slowest(counts[4], world.seconds) < 0.6 * _slowest(counts[0], world.seconds)


def test_the_log_compares_the_slow_rank_with_the_others(make_rank, clock, caplog):
    world = World(make_rank, clock, (1.0, 4.0))
    with caplog.at_level("INFO"):
        for _ in range(5):
            world.step()
    (message,) = caplog.messages
    assert "rank 1 takes 4.0 times as long for a micro-batch as the median rank" in message
    assert "now dealt by speed: 10, 2; a step takes about 58 % less time" in message


def test_waits_for_peers_do_not_count_as_work(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0))
    for rank, work in zip(world.ranks, world.seconds, strict=True):

        def begin_micro_batch(*_, session=rank.session, wait=4.0 - work, **__):
            clock.now += wait
            session.waited_s += wait

        rank.session.begin_micro_batch = begin_micro_batch
    counts = [world.step() for _ in range(6)]
    assert counts[-1][2] < counts[0][2]


def test_small_differences_change_nothing(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.1, 1.0))
    assert [world.step() for _ in range(20)] == [[4, 4, 4]] * 20


def test_parts_are_equal_again_when_the_slow_rank_recovers(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0))
    for _ in range(6):
        world.step()
    world.seconds = (1.0, 1.0, 1.0)
    counts = [world.step() for _ in range(12)]
    assert counts[0] != [4, 4, 4]
    assert counts[-1] == [4, 4, 4]


def test_a_rank_with_only_the_short_last_micro_batch_is_timed(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0), micro_batch_size=5)  # 5, 5, 5, 5, 4
    counts = [world.step() for _ in range(6)]
    assert [counts[0], counts[-1]] == [[2, 2, 1]] * 2
    world = World(make_rank, clock, (4.0, 1.0, 1.0), micro_batch_size=5)
    counts = [world.step() for _ in range(6)]
    assert [counts[0], counts[-1]] == [[2, 2, 1], [1, 2, 2]]
    world.seconds = (1.0, 1.0, 4.0)
    assert [world.step() for _ in range(4)][-1] == [2, 2, 1]
    world.seconds = (1.0, 4.0, 1.0)
    assert [world.step() for _ in range(8)][-1] == [2, 1, 2]


def test_new_generation_starts_with_equal_parts(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0))
    for _ in range(6):
        world.step()
    world.change_generation()
    assert world.step() == [4, 4, 4]


def test_a_failed_exchange_changes_nothing(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0))
    for rank in world.ranks:
        rank.session.sum_numbers = lambda values: None
    assert [world.step() for _ in range(10)] == [[4, 4, 4]] * 10


def test_default_parts_are_equal_and_nothing_is_exchanged(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0), balance=False)
    for rank in world.ranks:
        rank.session.sum_numbers = None
    assert [world.step() for _ in range(10)] == [[4, 4, 4]] * 10


@pytest.mark.parametrize("round_steps", [1, 3, 5, 8])
def test_local_sgd_ranks_are_dealt_by_speed_after_a_round(make_rank, clock, round_steps):
    world = World(make_rank, clock, (1.0, 1.0, 4.0), round_steps=round_steps)
    counts = [world.step() for _ in range(24)]
    # steps 2 and 3 are the first that are timed
    first = next(end for end in range(round_steps, 24, round_steps) if end >= 3)
    assert counts[:first] == [[4, 4, 4]] * first
    assert counts[first:] in ([[5, 5, 2]] * (24 - first), [[6, 5, 1]] * (24 - first))


def test_local_sgd_ranks_use_configured_speeds_after_their_first_round(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 1.0), round_steps=2)
    world.ranks[2].session.speed = 0.25
    counts = [world.step() for _ in range(4)]
    assert counts[:2] == [[4, 4, 4]] * 2
    assert counts[2:] in ([[5, 5, 2]] * 2, [[6, 5, 1]] * 2)


def test_round_in_a_new_generation_starts_with_equal_parts(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0), round_steps=4)
    for _ in range(6):
        world.step()
    world.change_generation()
    assert [world.step() for _ in range(2)] == [[4, 4, 4]] * 2


def test_ranks_without_rounds_keep_equal_parts(make_rank, clock):
    world = World(make_rank, clock, (1.0, 1.0, 4.0), round_steps=1000)
    assert [world.step() for _ in range(10)] == [[4, 4, 4]] * 10


@pytest.mark.parametrize(("least_samples", "warnings"), [(1, 0), (2, 1)])
def test_a_division_by_speed_warns_once_of_batch_normalization(
    make_rank, clock, caplog, least_samples, warnings
):
    world = World(make_rank, clock, (1.0, 4.0), least_samples=least_samples)
    for _ in range(9):
        world.step()
    world.change_generation()
    for _ in range(9):
        world.step()
    assert world.step() == [10, 2]
    assert sum("the model has batch normalization" in line for line in caplog.messages) == warnings


def test_plain_batches_cannot_be_balanced():
    with pytest.raises(ConfigurationError, match="micro_batch_size"):
        ElasticDataLoader(torch.arange(8), global_batch_size=4, balance=True)


def test_shares_show_a_rank_without_micro_batches():
    def shares(global_batch_size, samples, dealt):
        return [
            balance.Balance(
                global_batch_size=global_batch_size, micro_batch_size=8, wanted=False
            ).share(
                SimpleNamespace(
                    placement=Placement(generation=1, rank=rank, world_size=3),
                    positions=range(samples),
                ),
                blocks,
            )
            for rank, blocks in enumerate(dealt)
        ]

    assert shares(16, 16, [1, 1, 0]) == [1.5, 1.5, 0.0]
    assert shares(24, 24, [1, 1, 1]) == [0.0] * 3
    assert shares(24, 8, [1, 0, 0]) == [0.0] * 3, "only the last step of an epoch is short"


def test_a_round_that_ends_with_a_short_step_counts():
    offers, balances = (
        [],
        [balance.Balance(global_batch_size=16, micro_batch_size=2, wanted=True) for _ in range(2)],
    )
    placements = [Placement(generation=1, rank=rank, world_size=2) for rank in range(2)]

    def step(rank, samples):
        return SimpleNamespace(
            placement=placements[rank], positions=range(samples), steps_before=389
        )

    for rank, speed in enumerate((1.0, 0.25)):
        session = SimpleNamespace(steps_alone=True, speed=speed, offer_numbers=offers.append)
        assert balances[rank].costs(placements[rank]) is None
        balances[rank].offer(step(rank, 24), session)
        balances[rank].offer(step(rank, 4), session)
    summed = [sum(column) for column in zip(offers[1], offers[3], strict=True)]
    for rank, own in enumerate(balances):
        own.round_ended(summed, step(rank, 4), "loader")
        assert own.costs(placements[rank]) is not None
