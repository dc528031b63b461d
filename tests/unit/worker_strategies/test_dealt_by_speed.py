"""Every strategy trains to the same result when micro-batches are dealt by speed, and local_sgd to
the weighted mean of its ranks."""

import copy

import pytest
import shoal
import torch
from shoal_worker.data import balance
from torch import nn
from torch.utils.data import TensorDataset

RANKS = 4
COSTS = (1.0, 3.0, 2.0, 6.0)
OPTIONS = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "fsdp": {},
    "hsdp": {"shard_size": 2},
    "hybrid": {"data_parallel_strategy": "zero2", "tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
BITWISE = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")


def _train(strategy, wanted):
    """Returns the parameters after 12 steps, and rank 0's number of micro-batches in each step."""

    def main():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        exact = {"deterministic": True} if strategy in BITWISE else {}
        model, optimizer = shoal.as_distributed(
            net, optimizer, strategy=strategy, **OPTIONS[strategy], **exact
        )
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(12 * 24, 8, generator=generator),
            torch.randint(0, 4, (12 * 24,), generator=generator),
        )
        loader = shoal.ElasticDataLoader(
            data, global_batch_size=24, micro_batch_size=2, balance=wanted
        )
        counts = []
        for step in loader.steps():
            counts.append(len(step))
            for x, y in step:
                if strategy == "pipeline":
                    model.train_step(x, y, nn.functional.cross_entropy)
                else:
                    nn.functional.cross_entropy(model(x), y).backward()
            assert optimizer.step()
            optimizer.zero_grad()
        whole = model.full_state_dict()
        return {name: value.clone() for name, value in whole.items()}, counts

    return shoal.launch(main, world_size=RANKS)


@pytest.mark.parametrize("strategy", list(OPTIONS))
def test_the_result_does_not_depend_on_the_division(strategy, monkeypatch):
    monkeypatch.setattr(balance, "agreed_costs", lambda summed, ranks: COSTS[:ranks])
    by_speed, evenly = _train(strategy, True), _train(strategy, False)
    counts, equal = [each for _, each in by_speed], [each for _, each in evenly]
    assert [each[:4] for each in counts] == [each[:4] for each in equal]
    fastest = {"hybrid": 9, "pipeline": 9}.get(strategy, 6)  # of 12; those have two replicas
    assert counts[0][4:] == [fastest] * 8
    for (weights, _), (expected, _) in zip(by_speed, evenly, strict=True):
        for name, value in expected.items():
            if strategy in BITWISE:
                assert torch.equal(weights[name], value), name
            else:
                torch.testing.assert_close(weights[name], value)


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def _samples():
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(12 * 24, 8, generator=generator, dtype=torch.float64),
        torch.randn(12 * 24, 4, generator=generator, dtype=torch.float64),
    )


def _by_hand(parts_of_round):
    """Returns the parameters of local SGD in one process. `parts_of_round`: for each round of four
    steps, each rank's number of micro-batches per step."""
    xs, ys = (values.split(2) for values in _samples())
    state, begin = _network().state_dict(), 0
    for parts in parts_of_round:
        nets = [copy.deepcopy(_network()) for _ in parts]
        for net in nets:
            net.load_state_dict(state)
        for _ in range(4):
            for net, count in zip(nets, parts, strict=True):
                net.zero_grad()
                for number in range(begin, begin + count):
                    loss = nn.functional.mse_loss(net(xs[number]), ys[number])
                    (loss / count).backward()
                begin += count
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
        state = {
            name: sum(
                net.state_dict()[name] * count / sum(parts)
                for net, count in zip(nets, parts, strict=True)
            )
            for name in state
        }
    return state


def test_local_sgd_is_dealt_by_speed_after_a_round_and_weights_ranks_by_their_samples(monkeypatch):
    monkeypatch.setattr(balance, "agreed_costs", lambda summed, ranks: COSTS[:ranks])

    def main():
        net = _network()
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy="local_sgd", sync_every=4
        )
        loader = shoal.ElasticDataLoader(
            TensorDataset(*_samples()),
            global_batch_size=24,
            micro_batch_size=2,
            shuffle=False,
            balance=True,
        )
        counts = []
        for step in loader.steps():
            counts.append(len(step))
            for x, y in step:
                nn.functional.mse_loss(model(x), y).backward()
            assert optimizer.step()
            optimizer.zero_grad()
        whole = model.full_state_dict()
        return {name: value.clone() for name, value in whole.items()}, counts

    results = shoal.launch(main, world_size=RANKS)
    by_speed = balance.divided(12, COSTS)
    assert [counts for _, counts in results] == [[3] * 4 + [each] * 8 for each in by_speed]
    expected = _by_hand([(3, 3, 3, 3), by_speed, by_speed])
    for weights, _ in results:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
