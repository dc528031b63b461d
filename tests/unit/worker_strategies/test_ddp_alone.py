"""ddp in a world of one: without a cluster, a user's script computes what plain torch computes, and
each mistake raises one clear error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import MembershipChanged
from shoal_worker.elastic.session.worker_process import current_session, set_session
from torch import nn

from tests.unit.worker_strategies.small_problem import data, network

pytestmark = pytest.mark.usefixtures("fresh_session")


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 1e-2)],
    ids=["sgd", "adamw"],
)
def test_a_loop_over_a_plain_dataloader_is_bitwise_torchs(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    batches = list(torch.utils.data.DataLoader(data(), batch_size=8))
    plain = network()
    optimizer = make(plain.parameters())
    for x, y in batches:
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    net = network()
    model, distributed = shoal.as_distributed(net, make(net.parameters()))
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        assert distributed.step()
        distributed.zero_grad()
    assert same(plain, net)


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    x, y = data(12).tensors
    plain = nn.Linear(6, 3)
    start = {n: p.clone() for n, p in plain.state_dict().items()}
    nn.functional.cross_entropy(plain(x), y).backward()
    net = nn.Linear(6, 3)
    net.load_state_dict(start)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 1.0), deterministic=True
    )
    loader = shoal.ElasticDataLoader(
        data(12), global_batch_size=12, micro_batch_size=5, shuffle=False
    )
    for step in loader.steps():
        for inputs, labels in step:
            nn.functional.cross_entropy(model(inputs), labels).backward()
        gradient = net.weight.grad
        assert gradient is not None
        assert torch.allclose(gradient, plain.weight.grad, atol=1e-6)
        optimizer.step()


def test_running_statistics_are_the_weighted_mean_over_micro_batches() -> None:
    net = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 3))
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.0))
    x = data(12).tensors[0]
    loader = shoal.ElasticDataLoader(
        data(12), global_batch_size=12, micro_batch_size=8, shuffle=False
    )
    for step in loader.steps():
        for inputs, labels in step:
            nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert torch.allclose(
        net[0].running_mean, (8 * x[:8].mean(0) + 4 * x[8:].mean(0)) / 12, atol=1e-6
    )
    assert net[0].num_batches_tracked == 1


def test_a_scheduler_on_the_distributed_optimizer_moves_the_users_one() -> None:
    net = network()
    inner = torch.optim.SGD(net.parameters(), 1.0)
    model, optimizer = shoal.as_distributed(net, inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model(data().tensors[0]).sum().backward()
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1)


def test_grad_scaler_unscales_and_skips_overflows() -> None:
    net = nn.Linear(6, 3)
    start = net.weight.detach().clone()
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(net.weight, start - 2.0)
    optimizer.zero_grad()
    before = net.weight.detach().clone()
    scaler.scale(model(torch.full((2, 6), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight, before)
    assert scaler.get_scale() == 512.0


def test_train_step_returns_the_loss() -> None:
    net = network()
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    x, y = data().tensors
    expected = nn.functional.cross_entropy(network()(x), y)
    assert torch.allclose(model.train_step(x, y, nn.functional.cross_entropy), expected)
    assert optimizer.step()


def test_losses_of_micro_batches_are_summed_over_ranks_by_their_weights() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.0))
    x = torch.arange(32.0).view(8, 4)
    x[2:4] = torch.nan
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(x),
        global_batch_size=8,
        micro_batch_size=2,
        shuffle=False,
        # the micro-batches weigh 1, 0, 17 and 25
        weight_fn=lambda b: 0.0 if b[0].isnan().any() else float(b[0][0, 0] + 1),
    )
    for step in loader.steps():
        for (batch,) in step:
            model.train_step(batch, torch.zeros(2, 1), nn.functional.mse_loss)
        lifecycle = current_session().lifecycle
        _, loss, weight, *_ = lifecycle.step_vote(lifecycle.require())
        assert weight == 1 + 17 + 25
        with torch.no_grad():
            expected = sum(
                net(x[first : first + 2]).square().mean() * (x[first, 0] + 1) for first in (0, 4, 6)
            )
        assert loss == pytest.approx(float(expected))
        assert optimizer.step()


def test_train_step_in_micro_batches_returns_each_ones_loss_and_the_step_has_their_mean() -> None:
    model, optimizer = _pair()
    loader = shoal.ElasticDataLoader(data(12), global_batch_size=12, micro_batch_size=5)
    for step in loader.steps():
        losses = [
            (float(model.train_step(x, y, nn.functional.cross_entropy)), len(x)) for x, y in step
        ]
        assert [count for _, count in losses] == [5, 5, 2]
        assert optimizer.step()
    assert current_session().progress.snapshot().loss == pytest.approx(
        sum(loss * count for loss, count in losses) / 12
    )


def test_evaluate_sums_every_batch_once() -> None:
    net = network()
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = shoal.ElasticDataLoader(data(40), global_batch_size=7, train=False)
    sums = shoal.evaluate(
        model, loader, lambda m, batch: {"samples": len(batch[1]), "x": batch[0].sum()}
    )
    assert sums["samples"] == 40
    assert sums["x"] == pytest.approx(float(data(40).tensors[0].sum()), abs=1e-3)
    assert model.training


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda m: shoal.evaluate(m, [data().tensors[0]], lambda n, x: {}),
        lambda m: m.predict(data().tensors[0]),
    ],
)
def test_modules_that_the_user_froze_stay_frozen_after_an_evaluation(
    evaluate: Callable[[Any], Any],
) -> None:
    net = network()
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    model.train()
    net[1].eval()
    evaluate(model)
    assert [module.training for module in net] == [True, False, True, True]
    assert model.training


def test_early_stopping_waits_for_patience() -> None:
    net = network()
    _, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    answers = [
        optimizer.should_early_stop(m, patience=2, min_delta=0.1)
        for m in (1.0, torch.tensor(0.5), 0.45, 0.44)
    ]
    assert answers == [False, False, False, True]
    with pytest.raises(shoal.ConfigurationError, match="expected one number"):
        optimizer.should_early_stop(torch.zeros(2))


def test_saved_run_continues_in_another(tmp_path: Path) -> None:
    def run(epochs: int) -> nn.Module:
        set_session(None)
        net = network()
        model, optimizer = shoal.as_distributed(net, torch.optim.AdamW(net.parameters(), 1e-2))
        loader = shoal.ElasticDataLoader(data(), global_batch_size=16)
        shoal.resume(tmp_path)
        for _ in loader.epochs(epochs):
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            shoal.save_checkpoint(tmp_path)
        shoal.shutdown()
        return net

    run(2)
    resumed = run(4)
    for path in tmp_path.iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert same(resumed, run(4))


def test_a_serialized_model_loads_into_another_and_refuses_a_different_one(tmp_path: Path) -> None:
    net = network()
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    model.save_model(tmp_path / "model.safetensors")
    set_session(None)
    other = network()
    with torch.no_grad():
        other[0].weight.zero_()
    copy, _ = shoal.as_distributed(other, torch.optim.SGD(other.parameters(), 0.1))
    copy.load_model(tmp_path / "model.safetensors")
    assert same(net, other)
    set_session(None)
    small = nn.Linear(2, 2)
    foreign, _ = shoal.as_distributed(small, torch.optim.SGD(small.parameters(), 0.1))
    before = small.weight.detach().clone()
    with pytest.raises(shoal.CorruptDataError, match="a different model"):
        foreign.load_model(tmp_path / "model.safetensors")
    assert torch.equal(small.weight, before)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(shoal.CorruptDataError, match="complete"):
        foreign.load_model(tmp_path / "model.safetensors")


def test_optimizer_state_continues_in_another_and_a_different_one_is_refused() -> None:
    def trained() -> tuple[nn.Module, Any, Any]:
        set_session(None)
        net = network()
        model, optimizer = shoal.as_distributed(net, torch.optim.AdamW(net.parameters(), 1e-2))
        step(model, optimizer)
        return net, model, optimizer

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(data().tensors[0]).square().sum().backward()
        optimizer.step()

    net, model, optimizer = trained()
    state = optimizer.serialize()
    step(model, optimizer)
    again, copy, fresh = trained()
    fresh.state.clear()
    fresh.deserialize(state)
    step(copy, fresh)
    assert same(net, again)
    set_session(None)
    small = nn.Linear(2, 2)
    other, refusing = shoal.as_distributed(small, torch.optim.AdamW(small.parameters(), 1e-2))
    with pytest.raises(shoal.CorruptDataError, match="another optimizer"):
        refusing.deserialize(state)
    with pytest.raises(shoal.CorruptDataError, match="not an optimizer's"):
        refusing.deserialize(other.serialize())


def test_clone_stays_unchanged_and_is_not_trained() -> None:
    model, optimizer = _pair()
    clone = model.clone()
    x = data().tensors[0]
    before = model.predict(x)
    model(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(clone.predict(x), before)
    assert not torch.equal(model.predict(x), before)
    with pytest.raises(shoal.PreconditionError, match="clone"):
        clone(x)


def test_weights_can_be_averaged_by_torchs_own_functions() -> None:
    model, optimizer = _pair()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        model(data().tensors[0]).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    averaged.eval()
    assert averaged(data().tensors[0]).shape == (40, 3)
    assert not torch.equal(averaged.module.module[0].weight, model.module[0].weight)


def test_lost_step_restores_the_buffers_of_its_start() -> None:
    model, optimizer = _pair()
    x = data().tensors[0]
    model(x).square().sum().backward()
    optimizer.step()
    norm = model.module[1]
    norm.running_mean.fill_(5.0)  # a change by the user between two steps
    model(x).square().sum().backward()
    assert float(norm.running_mean[0]) != 5.0
    model.engine.discard_step()
    assert norm.running_mean.tolist() == [5.0] * 16
    assert int(norm.num_batches_tracked) == 1


def test_attributes_of_the_users_module_are_reached_through_the_model() -> None:
    net = network()
    net.vocabulary = 7
    model = shoal.as_distributed(net)
    assert model.vocabulary == 7
    assert model.module is net


def _pair() -> tuple[Any, Any]:
    net = network()
    return shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))


def test_a_summed_loss_is_summed_over_micro_batches() -> None:
    x, y = data(12).tensors
    plain = nn.Linear(6, 3)
    nn.functional.cross_entropy(plain(x), y, reduction="sum").backward()
    net = nn.Linear(6, 3)
    net.load_state_dict(plain.state_dict())
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), loss_reduction="sum"
    )
    loader = shoal.ElasticDataLoader(
        data(12), global_batch_size=12, micro_batch_size=5, shuffle=False
    )
    for step in loader.steps():
        for inputs, labels in step:
            nn.functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
        assert torch.allclose(net.weight.grad, plain.weight.grad, atol=1e-5)
        optimizer.step()


def test_a_forward_pass_before_the_loop_disturbs_nothing() -> None:
    net = network()
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    before = [b.clone() for b in net.buffers()]
    model(data().tensors[0])
    loader = shoal.ElasticDataLoader(data(), global_batch_size=40)
    for x, y in loader:
        assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))
        nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.step()


def test_a_closure_is_refused() -> None:
    _, optimizer = _pair()
    with pytest.raises(shoal.ConfigurationError, match="closure"):
        optimizer.step(lambda: None)


def test_a_second_model_is_refused() -> None:
    _pair()
    with pytest.raises(shoal.PreconditionError, match="called twice"):
        _pair()


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_second_call_is_refused_before_its_optimizer_is_checked(strategy: Any) -> None:
    net = network()
    given = net, torch.optim.SGD(net.parameters(), 0.1)
    returned = shoal.as_distributed(*given, strategy=strategy)
    for pair in (given, returned):
        with pytest.raises(shoal.PreconditionError, match="called twice"):
            shoal.as_distributed(*pair, strategy=strategy)


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(shoal.ConfigurationError, match="strategy='zero9': expected one of ddp"):
        shoal.as_distributed(network(), strategy="zero9")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(shoal.ConfigurationError, match="sync_evry"):
        shoal.as_distributed(network(), sync_evry=4)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(shoal.ConfigurationError, match="not parameters of the model"):
        shoal.as_distributed(network(), torch.optim.SGD(network().parameters(), 0.1))


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(shoal.ConfigurationError, match="nothing to train"):
        shoal.as_distributed(nn.ReLU())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "tensor", "async_sgd"])
def test_a_lazy_model_is_refused_until_it_has_a_shape(strategy: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    for lazy in (net, nn.LazyLinear(3)):
        with pytest.raises(shoal.ConfigurationError, match="run one batch through it"):
            shoal.as_distributed(lazy, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "pipeline", "hybrid"]
)
def test_complex_parameters_are_refused_by_strategies_that_shard_them(strategy: str) -> None:
    net = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(shoal.ConfigurationError, match="'weight' is complex, but strategy="):
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)


def test_complex_parameters_are_refused_in_micro_batches() -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = shoal.ElasticDataLoader(data(), global_batch_size=8, micro_batch_size=4)
    with pytest.raises(shoal.ConfigurationError, match="complex"):
        list(next(loader.steps()))


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"sampler": torch.utils.data.DistributedSampler(range(40), 2, 0)}],
)
def test_a_loader_whose_batches_differ_by_rank_is_not_evaluated(options: dict[str, Any]) -> None:
    model, _ = _pair()
    loader = torch.utils.data.DataLoader(data(40), batch_size=8, **options)
    with pytest.raises(shoal.ConfigurationError, match="count twice"):
        shoal.evaluate(model, loader, lambda m, batch: {})


def test_additional_attributes_of_the_users_optimizer_are_reached_through_the_distributed_one() -> (
    None
):
    class Scheduled(torch.optim.SGD):
        phase = "train"

    net = network()
    _, optimizer = shoal.as_distributed(net, Scheduled(net.parameters(), 0.1))
    assert optimizer.phase == "train"
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(seen.append)
    optimizer.state_dict()
    assert len(seen) == 1
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = optimizer.nothing_of_that_name


def test_the_next_batch_without_a_step_is_refused_by_name() -> None:
    _pair()
    loader = shoal.ElasticDataLoader(data(), global_batch_size=8)
    with pytest.raises(shoal.PreconditionError, match=r"optimizer.step\(\) was not called"):
        for _ in loader:
            pass


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_deterministic_without_micro_batches_is_refused(strategy: str) -> None:
    net = network()
    model, _ = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, deterministic=True
    )
    x, _ = next(iter(shoal.ElasticDataLoader(data(), global_batch_size=8)))
    with pytest.raises(shoal.ConfigurationError, match="micro_batch_size"):
        model(x)


@pytest.mark.parametrize(
    "call", [lambda m: m.clip_grad_norm_(1.0), lambda m: m.synchronize_gradients()]
)
def test_gradients_are_not_reduced_inside_the_inner_loop(call: Callable[[Any], Any]) -> None:
    model, optimizer = _pair()
    loader = shoal.ElasticDataLoader(data(12), global_batch_size=12, micro_batch_size=5)
    for step in loader.steps():
        for x, y in step:
            nn.functional.cross_entropy(model(x), y).backward()
            with pytest.raises(
                shoal.PreconditionError, match="only after the loop over the step's micro-batches"
            ):
                call(model)
        call(model)
        assert optimizer.step()


def test_step_without_a_forward_pass_is_refused() -> None:
    _, optimizer = _pair()
    with pytest.raises(shoal.PreconditionError, match="no step has begun"):
        optimizer.step()


def test_torchrun_without_a_coordinator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(shoal.ConfigurationError, match="shoal run"):
        shoal.init()


@pytest.mark.parametrize(
    ("clears", "warned"), [("never", True), ("first", False), ("last", False), ("by hand", False)]
)
def test_gradients_to_accumulate_are_not_silently_lost_with_a_step(
    clears: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = network()
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    outcomes = []
    for inputs, labels in shoal.ElasticDataLoader(data(32), global_batch_size=8):
        if clears == "first":
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if len(outcomes) == 2:
            current_session().lifecycle.mark_lost(MembershipChanged("a peer is gone"))
        outcomes.append(bool(optimizer.step()))
        if clears == "last":
            optimizer.zero_grad()
        elif clears == "by hand":
            for parameter in net.parameters():
                parameter.grad = None
    assert outcomes == [True, True, False, True, True]
    assert ("gradients that earlier steps had accumulated" in caplog.text) is warned
