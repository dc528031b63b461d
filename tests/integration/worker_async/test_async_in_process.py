"""One worker in the test process, against real servers: which calls are allowed when, and how bad
input is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import ConfigurationError, InvalidRequestError, PreconditionError
from shoal_common.optimizers.for_torch import LAMB, RowWiseAdagrad
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2, parameter_server_pb2
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.step.pass_writes import some_of
from shoal_worker.state.serial import load_tensors
from shoal_worker.strategies.fitting import OptimizationInputData
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.in_process import backward, distributed, versions
from tests.integration.worker_async.train import FEATURES, network, problem

Make = Callable[..., AsyncCluster]


def test_single_worker_takes_the_steps_of_the_torch_optimizer(session: Session) -> None:
    reference, net = network(0), network(0)
    model, optimizer = distributed(net)
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        for each, step in ((model, optimizer), (reference, plain)):
            backward(each)
            step.step()
            step.zero_grad()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert optimizer.last_staleness == 0
    assert optimizer.state == {}


def test_the_metrics_name_the_generation_in_which_a_worker_trains(session: Session) -> None:
    model, optimizer = distributed()
    backward(model)
    optimizer.step()
    registry = session.metrics.registry
    found = {
        name: registry.get_sample_value(f"shoal_worker_{name}")
        for name in ("generation", "rank", "world_size")
    }
    assert found == {"generation": 1, "rank": 0, "world_size": 1}


def test_non_finite_gradient_is_not_sent_and_its_batch_can_be_skipped(
    session: Session, running: AsyncCluster
) -> None:
    model, optimizer = distributed()
    backward(model)
    model.module[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(
        InvalidRequestError, match=r"1 of 128 values in the gradient of '0\.weight' are NaN"
    ):
        optimizer.step()
    assert versions(running) == {1}
    optimizer.zero_grad()
    assert optimizer.step()
    backward(model)
    assert optimizer.step()
    assert versions(running) == {2}


class MomentumEncoder(nn.Module):
    """Writes a frozen parameter in its forward pass, via `.data` if `by_data`, else in place."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.online, self.key, self.by_data = (
            nn.Linear(FEATURES, 4),
            nn.Linear(FEATURES, 4),
            by_data,
        )
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            key = self.key.weight.data if self.by_data else self.key.weight
            key.lerp_(self.online.weight, 0.1)
        return self.online(x) - self.key(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_parameter_written_by_a_forward_pass_is_refused_without_losing_the_write(
    session: Session, running: AsyncCluster, by_data: bool
) -> None:
    model, optimizer = distributed(MomentumEncoder(by_data=by_data))
    backward(model)
    with pytest.raises(
        ConfigurationError,
        match=r"parameter 'key\.weight' was written in the passes of a step.*'async_sgd'",
    ) as caught:
        optimizer.step()
    assert "with_parameters" not in str(caught.value)  # it is refused after the first step
    assert versions(running) == {1}  # nothing was pushed


class Clipping(nn.Linear):
    """Keeps its weights small from its second pass on."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes > 1:
            self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_a_later_pass_that_writes_through_data_is_refused(session: Session) -> None:
    model, optimizer = distributed(Clipping(FEATURES, 1))
    backward(model)
    optimizer.step()
    backward(model)
    with pytest.raises(ConfigurationError, match="'weight' was written in the passes of a step"):
        optimizer.step()


@pytest.mark.parametrize("then", ["step", "pull", "state"])
@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_parameter_written_between_two_steps_is_refused_and_not_overwritten(
    session: Session, name: str, then: str
) -> None:
    net = network(0)
    net[2].weight.requires_grad_(False)
    model, optimizer = distributed(net)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    net.get_parameter(name).data.clamp_(-0.01, 0.01)
    calls = {
        "step": lambda: backward(model),
        "pull": optimizer.synchronize_parameters,
        "state": model.full_state_dict,
    }
    with pytest.raises(ConfigurationError, match=f"'{name}' was written between two steps"):
        calls[then]()


def test_write_missed_by_the_sampled_elements_is_warned_of_once_and_then_refused(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Linear(64, 1))
    weight = net[0].weight
    model, optimizer = distributed(net)

    def step() -> None:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()

    def write() -> None:
        with torch.no_grad():
            weight[1, 1] += 1.0

    def undo() -> None:
        with torch.no_grad():
            weight[1, 1] -= 1.0

    step()
    assert weight[1, 1] not in some_of(weight).view(torch.float32)
    for _ in range(2):
        write()
        undo()
        model.full_state_dict()
        step()
    warned = [each.getMessage() for each in caplog.records if "between two" in each.getMessage()]
    assert len(warned) == 1
    assert "parameter '0.weight' was written between two steps" in warned[0]
    write()
    with pytest.raises(ConfigurationError, match=r"'0\.weight' was written between two steps"):
        backward(model)


@pytest.mark.parametrize("ends", [False, True], ids=["within an epoch", "at its end"])
def test_a_save_within_an_epoch_that_a_resumed_run_repeats_is_warned_of_once(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    model, optimizer = distributed()
    data = torch.utils.data.TensorDataset(torch.ones(12, FEATURES))
    loader = shoal.ElasticDataLoader(data, batch_size=4)
    for _ in loader.epochs(2):
        for (inputs,) in loader:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not ends:
                shoal.save_checkpoint(tmp_path)
        shoal.save_checkpoint(tmp_path)
    warned = [each.getMessage() for each in caplog.records if "within epoch" in each.getMessage()]
    assert len(warned) == (0 if ends else 1)
    assert all("within epoch 0 of loader 'loader'" in message for message in warned)


def test_relative_checkpoint_directory_is_resolved_at_the_call(
    running: AsyncCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    with running.member():
        model, optimizer = distributed()
        backward(model)
        optimizer.step()
        shoal.save_checkpoint("checkpoints")
        monkeypatch.chdir(elsewhere)
        backward(model)
        optimizer.step()
    assert (here / "checkpoints" / "step-1" / "checkpoint.json").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("within_step", [False, True])
def test_weights_swapped_in_for_an_evaluation_and_out_again_are_not_writes(
    session: Session, within_step: bool
) -> None:
    net = network(0)
    model, optimizer = distributed(net)
    added = 0.3 * torch.randn_like(net[0].weight)

    def swap() -> None:
        net[0].weight.data += added  # as LoRA layers merge in eval(): rounding leaves a difference
        net[0].weight.data -= added

    for step in range(4):
        backward(model)
        if within_step and step:
            swap()
        optimizer.step()
        optimizer.zero_grad()
        if not within_step:
            swap()
    assert optimizer.last_staleness == 0


def test_gradient_scaler_unscales_and_skips_overflows(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    model, optimizer = distributed(net)
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    shoal.register_state(scaler=scaler)
    for overflow in (False, True, False):
        scaler.scale(
            model(torch.ones(4, FEATURES)).square().mean() * (float("inf") if overflow else 1.0)
        ).backward()
        assert scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not overflow:
            backward(reference)
            plain.step()
            plain.zero_grad()
    assert versions(running) == {3}
    assert scaler.get_scale() == 512.0
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_frozen_parameters_and_those_without_gradients_stay_unchanged(session: Session) -> None:
    net = nn.ModuleDict(
        {"used": nn.Linear(FEATURES, 1), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)}
    )
    net["frozen"].requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.1, weight_decay=0.5),
        strategy="async_sgd",
    )
    session.lifecycle.ensure_step()
    model.module["used"](torch.ones(1, FEATURES)).sum().backward()
    optimizer.step()
    after = model.full_state_dict()
    assert sorted(name for name in before if not torch.equal(before[name], after[name])) == [
        "used.bias",
        "used.weight",
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"consistency": "ssp", "staleness_bound": 0}, {"consistency": "bsp"}],
    ids=["asp", "ssp", "bsp"],
)
def test_server_may_hold_only_frozen_parameters(
    session: Session, running: AsyncCluster, options: dict[str, Any]
) -> None:
    net = nn.ModuleDict({name: nn.Linear(FEATURES, 1, bias=False) for name in ("used", "frozen")})
    net["frozen"].requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net["used"].parameters(), 0.1), strategy="async_sgd", **options
    )
    for _ in range(3):
        session.lifecycle.ensure_step()
        model.module["used"](torch.ones(1, FEATURES)).sum().backward()
        optimizer.step()
    held = [
        [partition.version for partition in server.look().partitions] for server in running.servers
    ]
    assert sorted(held) == [[1], [4]]
    optimizer.synchronize_parameters()
    after = model.full_state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "used.weight"
    ]


def test_later_push_is_not_mistaken_for_a_partly_refused_one(cluster: Make) -> None:
    """The script catches the error and continues with other batches. Each of them counts once on
    each partition, and so does the first batch when it is repeated."""
    running = cluster(keeps_data=False, servers=1)
    net = nn.ModuleDict({name: nn.Linear(FEATURES, 1, bias=False) for name in ("sound", "wild")})
    net["wild"].bfloat16()  # a partition of its own, the second one
    with running.member():
        _, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 10.0), strategy="async_sgd"
        )
        loader = shoal.ElasticDataLoader(problem(), batch_size=64, name="train")

        def step(wild: float) -> None:
            for name, value in (("sound", 1.0), ("wild", wild)):
                weight = net[name].weight
                weight.grad = torch.full_like(weight, value)
            optimizer.step()
            optimizer.zero_grad()

        batches = iter(loader)
        next(batches)
        with pytest.raises(InvalidRequestError, match="NaN or infinite"):
            step(3e38)
        batches.close()
        other = shoal.ElasticDataLoader(problem(), batch_size=64, name="other")
        for _ in other:
            step(1.0)
        assert versions(running) == {1 + len(other), 1 + len(other) + 1}
        for _ in loader:
            step(1.0)
        assert versions(running) == {1 + len(other) + len(loader)}


@pytest.mark.parametrize("clip", ["model", "torch"])
def test_gradients_are_clipped_by_their_norm_over_all_servers(
    session: Session, running: AsyncCluster, clip: str
) -> None:
    """The norm equals that of a single process, even if parameter groups and dtypes are in separate
    partitions."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in net.parameters() if p.dim() > 1]},
            {"params": [p for p in net.parameters() if p.dim() == 1], "lr": 0.3},
        ]
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    reference, net = network(0), network(0)
    plain = make(reference)
    model, optimizer = shoal.as_distributed(net, make(net), strategy="async_sgd")
    for step in range(5):
        backward(reference, 100.0)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5 / (step + 1))
        backward(model, 100.0)
        norm = (
            model.clip_grad_norm_(0.5 / (step + 1))
            if clip == "model"
            else nn.utils.clip_grad_norm_(model.parameters(), 0.5 / (step + 1))
        )
        torch.testing.assert_close(norm, expected)
        assert expected > 1.0
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert len({server.address for server in running.servers if server.look().partitions}) == 2
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [LAMB, RowWiseAdagrad])
def test_shoals_own_optimizers_give_the_same_results_on_servers(
    session: Session, kind: Any
) -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": list(net[0].parameters())},
            {"params": list(net[2].parameters()), "weight_decay": 0.0},
        ]
        return kind(groups, lr=0.05, weight_decay=0.1)

    reference, net = network(0), network(0)
    plain = make(reference)
    model, optimizer = shoal.as_distributed(net, make(net), strategy="async_sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        for each, stepped in ((reference, plain), (model, optimizer)):
            backward(each)
            stepped.step()
            stepped.zero_grad()
        scheduler.step()
        for group in plain.param_groups:
            group["lr"] = 0.05 * 0.5 ** (step + 1)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pull_every", [1, 3])
def test_gradients_of_older_values_are_compensated(session: Session, pull_every: int) -> None:
    """Compensation applies from the first step on, because this worker's own pushes move the
    servers' values after each pull."""
    strength, rate = 0.5, 0.1
    net = nn.Linear(FEATURES, 1, bias=False)
    expected = then = net.weight.detach().clone()
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), rate),
        strategy="async_sgd",
        delay_compensation=strength,
        pull_every=pull_every,
    )
    for step in range(1, 7):
        session.lifecycle.ensure_step()
        gradient = net.weight.detach() + step
        net.weight.grad = gradient.clone()
        expected = expected - rate * (gradient + strength * gradient * gradient * (expected - then))
        assert optimizer.step()
        if step % pull_every == 0:
            then = expected
        if step == 4:
            optimizer.synchronize_parameters()
            then = expected
    torch.testing.assert_close(model.full_state_dict()["weight"], expected, rtol=1e-6, atol=1e-6)


def test_rows_that_servers_would_split_are_refused_before_any_server_is_configured(
    session: Session, running: AsyncCluster
) -> None:
    wide = nn.ParameterDict({"table": torch.zeros(2, (8 << 20) // 4 + 1), "small": torch.zeros(3)})
    with pytest.raises(ConfigurationError, match="parameter 'table' has rows of 2097153 elements"):
        shoal.as_distributed(wide, RowWiseAdagrad(wide.parameters()), strategy="async_sgd")
    assert not any(server.look().HasField("optimizer") for server in running.servers)


def test_values_are_pulled_at_the_configured_interval(session: Session) -> None:
    model, optimizer = distributed(pull_every=3)
    staleness, norms = [], []
    for _ in range(6):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        staleness.append(optimizer.last_staleness)
        norms.append(model.module[0].weight.detach().norm().item())
    assert staleness == [0, 1, 2, 0, 1, 2]
    assert norms[0] == norms[1] != norms[2] == norms[3] == norms[4] != norms[5]


def test_full_state_is_that_of_the_servers_and_reading_it_changes_nothing(
    session: Session, running: AsyncCluster
) -> None:
    model, optimizer = distributed(pull_every=2)
    backward(model)
    optimizer.step()
    own = model.local_shard["0.weight"].clone()
    whole = model.full_state_dict()
    assert list(whole) == list(model.module.state_dict())
    assert not torch.equal(whole["0.weight"], own)
    assert torch.equal(model.module[0].weight, own)
    assert torch.equal(model.gather_full_parameters()["0.weight"], whole["0.weight"])
    optimizer.synchronize_parameters()
    assert torch.equal(model.module[0].weight, whole["0.weight"])


def test_entries_computed_by_hooks_use_the_servers_values(session: Session) -> None:
    def halve(part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].half()
        state[f"{prefix}norm"] = part.weight.detach().norm()

    net = network(0)
    net[0]._register_state_dict_hook(halve)
    model, optimizer = distributed(net, pull_every=2)
    backward(model)
    optimizer.step()
    own = net[0].weight.detach().clone()
    whole, values = model.full_state_dict(), model.gather_full_parameters()
    assert not torch.equal(values["0.weight"], own)  # not yet pulled
    assert torch.equal(whole["0.weight"], values["0.weight"].half())
    assert torch.equal(whole["0.norm"], values["0.weight"].norm())
    assert torch.equal(net[0].weight, own)
    assert torch.equal(model.engine.capture()["model"]["0.weight"], values["0.weight"])


def test_tied_parameters_are_one_tensor_under_both_names(session: Session) -> None:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    net[1].weight = net[0].weight
    model, optimizer = distributed(net)
    backward(model)
    optimizer.step()
    whole = model.full_state_dict()
    assert torch.equal(whole["0.weight"], whole["1.weight"])
    assert torch.equal(whole["0.weight"], net[1].weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_train_too(session: Session, dtype: torch.dtype) -> None:
    net = nn.Linear(FEATURES, 1).to(dtype)
    before = net.weight.detach().clone()
    model, optimizer = distributed(net)
    model(torch.ones(4, FEATURES, dtype=dtype)).square().mean().backward()
    assert optimizer.step()
    assert not torch.equal(net.weight, before)
    assert net.weight.dtype is dtype


def test_values_on_the_servers_are_never_overwritten_by_accident(session: Session) -> None:
    model, optimizer = distributed()
    model.with_parameters({"0.bias": torch.zeros(16)})
    backward(model)
    with pytest.raises(PreconditionError, match="within a step"):
        optimizer.synchronize_parameters()
    optimizer.step()
    with pytest.raises(PreconditionError, match="the parameter servers already have newer values"):
        model.with_parameters({"0.bias": torch.zeros(16)})
    with pytest.raises(PreconditionError, match="the parameter servers already have newer values"):
        model.engine.restore({"model": {}, "optimizer": None})


def test_a_saved_model_has_the_servers_values_and_loads_only_before_the_first_step(
    session: Session, tmp_path: Path
) -> None:
    model, optimizer = distributed(pull_every=2)
    backward(model)
    optimizer.step()
    model.save_model(tmp_path / "model.safetensors")
    saved = {name: value.clone() for name, value in model.full_state_dict().items()}
    with pytest.raises(PreconditionError, match="the parameter servers already have newer values"):
        model.load_model(tmp_path / "model.safetensors")
    tensors, metadata = load_tensors((tmp_path / "model.safetensors").read_bytes())
    assert metadata["strategy"] == "async_sgd"
    assert all(torch.equal(tensors[name], value) for name, value in saved.items())


def test_clone_has_the_servers_values_and_is_not_trained(session: Session) -> None:
    model, optimizer = distributed(pull_every=2)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    clone = model.clone()
    assert all(
        value.equal(clone.state_dict()[name]) for name, value in model.full_state_dict().items()
    )
    clone(torch.ones(4, FEATURES)).sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.module.parameters())


def test_workers_load_only_the_settings_of_an_optimizer_state(session: Session) -> None:
    net = network(1)
    synchronous = torch.optim.SGD(net.parameters(), 0.5, momentum=0.25)
    net(torch.ones(4, FEATURES)).sum().backward()
    synchronous.step()
    _, optimizer = distributed()
    optimizer.load_state_dict(synchronous.state_dict())
    assert optimizer.state == {}
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(0.5, 0.25)]
    optimizer.param_groups[0]["lr"] = 0.125
    saved = optimizer.serialize()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.deserialize(saved)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_entire_fit_stops_when_the_metric_does_not_improve(session: Session) -> None:
    _, optimizer = distributed()
    data = OptimizationInputData(
        training=problem(),
        validation=problem(),
        loss_fn=nn.functional.mse_loss,
        metric_fn=lambda output, targets: torch.tensor(1.0),
        epochs=9,
        global_batch_size=len(problem()) // 4,
        patience=2,
    )
    result = optimizer.optimize(data)
    assert result.stopped_early
    assert (result.best_epoch, result.best_metric, len(result.history)) == (0, 1.0, 3)
    assert (result.steps, result.samples) == (3 * 4, 3 * len(problem()))
    assert result.history[2].training_loss < result.history[0].training_loss


def test_closures_are_refused(session: Session) -> None:
    _, optimizer = distributed()
    with pytest.raises(ConfigurationError, match="a closure would run the backward pass again"):
        optimizer.step(lambda: None)


def test_a_loader_of_common_steps_is_refused(session: Session) -> None:
    distributed()
    loader = shoal.ElasticDataLoader(problem(), global_batch_size=8)
    with pytest.raises(ConfigurationError, match=r"pass batch_size="):
        next(iter(loader))


@pytest.mark.parametrize("where", ["between epochs", "in an epoch", "after the loop"])
def test_a_step_without_a_loader_may_follow_a_loop_over_one(
    session: Session, running: AsyncCluster, where: str
) -> None:
    model, optimizer = distributed()

    def step() -> None:
        backward(model)
        assert optimizer.step()
        optimizer.zero_grad()

    for epoch in (loader := shoal.ElasticDataLoader(problem(), batch_size=128)).epochs(2):
        if where == "between epochs":
            step()
        for inputs, targets in loader:
            model.train_step(inputs, targets, nn.functional.mse_loss)
            assert optimizer.step()
            optimizer.zero_grad()
            if where == "in an epoch" and epoch == 1:
                step()
    step()
    steps = {"between epochs": 2, "in an epoch": 2, "after the loop": 0}[where]
    assert versions(running) == {1 + 4 + steps + 1}


def test_accumulating_over_batches_is_refused_with_a_remedy_for_leased_batches(
    session: Session,
) -> None:
    """Loaders of leased batches have no micro-batches, and refuse `micro_batch_size=`."""
    model, _ = distributed()
    batches = iter(shoal.ElasticDataLoader(problem(), batch_size=8))
    next(batches)
    backward(model)
    with pytest.raises(
        PreconditionError, match=r"pass a larger batch_size= to the loader and run a pass on"
    ):
        next(batches)


def test_a_model_without_its_optimizer_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"as_distributed\(model, optimizer, \.\.\.\)"):
        shoal.as_distributed(network(0), strategy="async_sgd")


def test_buffers_on_the_meta_device_are_refused(session: Session) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigurationError, match="buffers on the meta device"):
        distributed(net)


def test_rank_0_must_have_values(session: Session) -> None:
    with torch.device("meta"):
        net = nn.Linear(FEATURES, 1)
    model, _ = distributed(net)
    with pytest.raises(PreconditionError, match="rank 0's parameters are on the meta device"):
        session.lifecycle.begin_step(None)
    assert model.module is net


def test_meta_device_worker_receives_values_from_the_servers_and_trains(
    running: AsyncCluster,
) -> None:
    first = running.start_worker(epochs=1, hold_at=[1], settings={"lr": 0.1, "momentum": 0.9})
    first.wait_step(1)
    with torch.device("meta"):
        net = network(9)
    with running.member() as session:
        model, optimizer = distributed(net)
        session.lifecycle.begin_step(None)
        before = {name: value.clone() for name, value in model.full_state_dict().items()}
        assert all(torch.equal(before[name], value) for name, value in net.named_parameters())
        backward(model)
        optimizer.step()
        assert not any(torch.equal(before[name], value) for name, value in net.named_parameters())
        first.go(1)
        first.result()


def test_a_job_without_servers_is_refused_with_the_remedy(cluster: Make) -> None:
    with cluster(servers=0).member(), pytest.raises(ConfigurationError, match="run --servers"):
        distributed()


def test_a_worker_with_another_model_is_refused(session: Session, running: AsyncCluster) -> None:
    running.client.declare_tensors(
        running.job_id, [coordinator_pb2.TensorSpec(name="else", shape=[3], dtype="float32")]
    )
    with pytest.raises(PreconditionError) as refusal:
        distributed()
    assert refusal.value.reason == "TENSORS_CONFLICT"


def test_a_worker_with_another_optimizer_is_refused(
    session: Session, running: AsyncCluster
) -> None:
    spec = parameter_server_pb2.OptimizerSpec(name="adamw", hyperparameters={"lr": 0.5})
    asp = parameter_server_pb2.Consistency(mode=parameter_server_pb2.Consistency.MODE_ASP)
    with ParameterServerClient(ChannelSettings(address=running.servers[0].address)) as client:
        client.configure_optimizer(running.job_id, spec, asp)
    with pytest.raises(PreconditionError) as refusal:
        distributed()
    assert refusal.value.reason == "OPTIMIZER_CONFLICT"
