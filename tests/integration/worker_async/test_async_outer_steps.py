"""One worker with inner steps, in the test process, against real servers that run the outer
optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.errors import ConfigurationError, InvalidRequestError, PreconditionError
from shoal_worker.elastic.session.session import Session
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.in_process import backward, versions
from tests.integration.worker_async.train import FEATURES, network, problem

Make = Callable[..., AsyncCluster]


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    """Returns the outer optimizer of the DiLoCo paper."""
    return torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)


def distributed(
    net: nn.Module, *, outer: Any = nesterov, inner_steps: int = 3, **options: Any
) -> tuple[Any, Any]:
    """Wraps a model with AdamW on the worker; `outer` creates the servers' optimizer."""
    inner = torch.optim.AdamW(net.parameters(), 0.02, weight_decay=0.1)
    there = outer(net.parameters())
    return shoal.as_distributed(
        net, inner, strategy="async_sgd", inner_steps=inner_steps, outer_optimizer=there, **options
    )


def averaging(parameters: Any) -> torch.optim.Optimizer:
    """Returns an outer optimizer that, with one worker, adopts the worker's values unchanged."""
    return torch.optim.SGD(parameters, 1.0)


def assert_equal_values(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def diloco(
    net: nn.Module, inputs: list[torch.Tensor], targets: list[torch.Tensor], rounds: list[int]
) -> None:
    """Runs Algorithm 1 of Douillard et al. with one worker. `rounds`: number of inner steps in each
    round."""
    inner = torch.optim.AdamW(net.parameters(), 0.02, weight_decay=0.1)
    there = [p.detach().clone() for p in net.parameters()]
    outer = nesterov(there)
    taken = iter(zip(inputs, targets, strict=True))
    for steps in rounds:
        for _ in range(steps):
            x, y = next(taken)
            nn.functional.mse_loss(net(x), y).backward()
            inner.step()
            inner.zero_grad()
        for before, now in zip(there, net.parameters(), strict=True):
            before.grad = before - now.detach()
        outer.step()
        for before, now in zip(there, net.parameters(), strict=True):
            now.data.copy_(before)


def train(model: Any, optimizer: Any, *, epochs: int, size: int = 64) -> list[int]:
    """Trains on a loader and returns `steps_in_round` after each step."""
    loader = shoal.ElasticDataLoader(problem(), batch_size=size, shuffle=False, name="train")
    counted = []
    for _ in loader.epochs(epochs):
        for x, y in loader:
            model.train_step(x, y, nn.functional.mse_loss)
            assert optimizer.step()
            optimizer.zero_grad()
            counted.append(model.steps_in_round)
    return counted


def test_outer_optimizer_that_adopts_one_workers_values_gives_plain_training(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    plain = torch.optim.AdamW(reference.parameters(), 0.02, weight_decay=0.1)
    model, optimizer = distributed(net, outer=averaging)
    for step in range(7):
        for each, stepped in ((model, optimizer), (reference, plain)):
            backward(each)
            assert stepped.step() is not None or stepped is plain
            stepped.zero_grad()
        assert_equal_values(net, reference)
        assert model.steps_in_round == (step + 1) % 3
    assert versions(running) == {3}
    assert optimizer.last_staleness == 0


def test_rounds_that_end_with_an_epoch_follow_diloco(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    inputs, targets = problem()[:]
    diloco(reference, list(inputs.split(64)) * 3, list(targets.split(64)) * 3, [3, 1] * 3)
    model, optimizer = distributed(net)
    assert train(model, optimizer, epochs=3) == [1, 2, 0, 0] * 3
    assert_equal_values(net, reference)
    assert versions(running) == {1 + 2 * 3}


def test_full_state_within_a_round_is_the_servers(session: Session) -> None:
    net = network(0)
    model, optimizer = distributed(net)
    before = {name: value.clone() for name, value in net.named_parameters()}
    backward(model)
    optimizer.step()
    assert not torch.equal(net[0].weight, before["0.weight"])
    own = net[0].weight.detach().clone()
    assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
    assert torch.equal(net[0].weight, own)


def test_a_round_of_the_users_own_loop_can_be_ended_early(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    plain = torch.optim.AdamW(reference.parameters(), 0.02, weight_decay=0.1)
    model, optimizer = distributed(net, outer=averaging, inner_steps=100)
    for _ in range(4):
        for each, stepped in ((model, optimizer), (reference, plain)):
            backward(each)
            stepped.step()
            stepped.zero_grad()
    optimizer.synchronize_parameters()
    assert (versions(running), model.steps_in_round) == ({2}, 0)
    assert_equal_values(net, reference)
    optimizer.synchronize_parameters()
    assert versions(running) == {2}


def test_parameters_without_gradients_stay_unchanged_and_tied_ones_stay_tied(
    session: Session, running: AsyncCluster
) -> None:
    """Parameters without gradients stay as they are under plain torch. The outer optimizer has
    momentum and weight decay, but does not move a parameter that had no gradient in any step."""
    net = nn.ModuleDict(
        {name: nn.Linear(FEATURES, FEATURES) for name in ("used", "tied", "unused", "frozen")}
        | {"norm": nn.BatchNorm1d(FEATURES)}
    )
    net["tied"].weight = net["used"].weight
    net["frozen"].requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trained = [p for p in net.parameters() if p.requires_grad]
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(trained, 0.1),
        strategy="async_sgd",
        inner_steps=2,
        outer_optimizer=torch.optim.SGD(
            trained, 0.7, momentum=0.9, nesterov=True, weight_decay=0.1
        ),
    )
    for step in range(4):
        session.lifecycle.ensure_step()
        hidden = net["norm"](net["used"](torch.randn(4, FEATURES)))
        (
            net["tied"](hidden).square().sum() + (net["unused"].weight.sum() if step < 2 else 0.0)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            once = net["unused"].weight.detach().clone()
    after = model.full_state_dict()
    assert torch.equal(after["unused.weight"], once)
    assert not torch.equal(after["unused.weight"], before["unused.weight"])
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"unused.bias", "frozen.weight", "frozen.bias"}
    assert torch.equal(after["tied.weight"], after["used.weight"])
    assert after["norm.num_batches_tracked"] == 4


def test_non_finite_values_are_not_pushed_and_the_round_can_be_skipped(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    model, optimizer = distributed(net, inner_steps=2)
    before = {name: value.clone() for name, value in net.named_parameters()}
    backward(model)
    optimizer.step()
    backward(model)
    net[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(
        InvalidRequestError,
        match=r"after 2 inner steps, 1 of 128 values of '0\.weight' were NaN or infinite",
    ):
        optimizer.step()
    with pytest.raises(InvalidRequestError, match="after 2 inner steps"):
        optimizer.step()
    assert versions(running) == {1}
    assert all(torch.equal(value, before[name]) for name, value in net.named_parameters())
    optimizer.zero_grad()
    assert optimizer.step()
    assert (versions(running), model.steps_in_round) == ({1}, 0)
    optimizer.state.clear()
    for _ in range(2):
        backward(model)
        assert optimizer.step()
    assert versions(running) == {2}


def test_clipping_schedules_and_gradient_scalers_apply_to_the_inner_optimizer(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    expected = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        strategy="async_sgd",
        inner_steps=2,
        outer_optimizer=averaging(net.parameters()),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    shoal.register_state(scaler=scaler)
    for overflow in (False, True, False, False):
        loss = model(torch.ones(4, FEATURES)).square().mean() * (
            float("inf") if overflow else 100.0
        )
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        assert scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if not overflow:
            backward(reference, 100.0)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step()
            plain.zero_grad()
        expected.step()
    assert_equal_values(net, reference)
    assert versions(running) == {3}
    assert (scaler.get_scale(), optimizer.param_groups[0]["lr"]) == (512.0, 0.1 * 0.5**4)


def test_schedule_of_the_outer_optimizer_is_sent_with_the_next_push(session: Session) -> None:
    net = network(0)
    outer = averaging(net.parameters())
    model, optimizer = distributed(net, outer=lambda _: outer, inner_steps=1)
    scheduler = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.0)
    backward(model)
    optimizer.step()
    scheduler.step()
    before = net[0].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(net[0].weight, before)


def test_loop_left_within_a_round_undoes_it_and_its_batches_are_dealt_again(
    session: Session, running: AsyncCluster, caplog: pytest.LogCaptureFixture
) -> None:
    net = network(0)
    model, optimizer = distributed(net, outer=averaging)
    loader = shoal.ElasticDataLoader(problem(), batch_size=32, shuffle=False, name="train")
    before = net[0].weight.detach().clone()
    for steps, (x, y) in enumerate(loader, start=1):
        model.train_step(x, y, nn.functional.mse_loss)
        assert optimizer.step()
        optimizer.zero_grad()
        if steps == 5:
            break
        if steps == 3:
            pushed = net[0].weight.detach().clone()
    assert "was left 2 inner steps after the last push" in caplog.text
    assert model.steps_in_round == 0
    assert torch.equal(net[0].weight, pushed)
    assert not torch.equal(before, pushed)
    ledger = running.client.lease_batches(
        running.job_id, session.member_id, loader="train", epoch=0, batches_in_epoch=3, want=2
    )
    assert list(ledger.batches) == [1], (
        "the second round, of two that are left one may be this member's"
    )


def test_a_step_whose_loop_was_left_within_its_round_is_lost(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    model, optimizer = distributed(net)
    loader = shoal.ElasticDataLoader(problem(), batch_size=64, shuffle=False, name="train")
    for _ in loader.epochs(2):
        for x, y in loader:
            model.train_step(x, y, nn.functional.mse_loss)
            break
        assert not optimizer.step()
        optimizer.zero_grad()
    assert versions(running) == {1}


def test_round_without_its_last_step_is_undone_when_the_next_epoch_starts(
    session: Session, running: AsyncCluster
) -> None:
    reference, net = network(0), network(0)
    plain = torch.optim.SGD(reference.parameters(), 0.05)
    inner = torch.optim.SGD(net.parameters(), 0.05)
    model, optimizer = shoal.as_distributed(
        net, inner, strategy="async_sgd", inner_steps=3, outer_optimizer=averaging(net.parameters())
    )
    loader = shoal.ElasticDataLoader(problem(), batch_size=64, shuffle=False, name="train")
    for epoch in loader.epochs(2):
        for x, y in loader:
            if epoch == 0 and model.steps_in_round == 2:
                break
            model.train_step(x, y, nn.functional.mse_loss)
            assert optimizer.step()
            optimizer.zero_grad()
    for x, y in zip(*(each.split(64) for each in problem()[:]), strict=True):
        nn.functional.mse_loss(reference(x), y).backward()
        plain.step()
        plain.zero_grad()
    assert_equal_values(net, reference)
    assert versions(running) == {3}


def test_peeked_batch_is_dealt_again_with_its_round(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    model, optimizer = distributed(net)
    loader = shoal.ElasticDataLoader(problem(), batch_size=64, shuffle=False, name="train")
    looked_at, _ = next(iter(loader))
    taken = []
    for x, y in loader:
        taken.append(x)
        model.train_step(x, y, nn.functional.mse_loss)
        assert optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(taken[0], looked_at)
    assert torch.equal(torch.cat(taken), problem()[:][0])
    assert versions(running) == {3}


def test_a_step_whose_loop_was_left_at_the_end_of_its_round_is_pushed(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    model, optimizer = distributed(net, inner_steps=2)
    loader = shoal.ElasticDataLoader(problem(), batch_size=64, shuffle=False, name="train")
    for _ in loader.epochs(2):
        for x, y in loader:
            model.train_step(x, y, nn.functional.mse_loss)
            if model.steps_in_round == 1:
                break
            assert optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step()
        optimizer.zero_grad()
    assert versions(running) == {3}


def test_synchronization_and_other_loaders_within_a_round_are_refused(session: Session) -> None:
    net = network(0)
    model, optimizer = distributed(net)
    loader = iter(shoal.ElasticDataLoader(problem(), batch_size=32, name="train"))
    other = iter(shoal.ElasticDataLoader(problem(), batch_size=32, name="other"))
    model.train_step(*next(loader), nn.functional.mse_loss)
    optimizer.step()
    with pytest.raises(PreconditionError, match="was called 1 inner steps after the last push"):
        optimizer.synchronize_parameters()
    with pytest.raises(
        PreconditionError, match="its round of inner steps began with loader 'train'"
    ):
        next(other)


def test_a_checkpoint_has_the_inner_optimizers_state(
    session: Session, cluster: Make, tmp_path: Path
) -> None:
    net = network(0)
    model, optimizer = distributed(net, inner_steps=2)
    train(model, optimizer, epochs=1)
    state = model.engine.capture()
    moments = {name: value.clone() for name, value in optimizer.state[net[0].weight].items()}
    other = network(1)
    again = cluster(keeps_data=False, directory=_made(tmp_path / "again"))
    with again.member():
        model, optimizer = distributed(other, inner_steps=2)
        model.engine.restore(state)
        assert all(
            torch.equal(optimizer.state[other[0].weight][name], value)
            for name, value in moments.items()
        )
        assert_equal_values(other, net)


def test_checkpoint_without_inner_state_provides_the_settings(session: Session) -> None:
    """A checkpoint of plain async_sgd has no inner state, so the new settings are used. Adagrad
    creates its state in its constructor."""
    net = network(0)
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.Adagrad(net.parameters(), 0.1),
        strategy="async_sgd",
        inner_steps=1,
        outer_optimizer=averaging(net.parameters()),
    )
    groups = [{**group, "lr": 0.25} for group in optimizer.state_dict()["param_groups"]]
    model.engine.restore(
        {"model": net.state_dict(), "optimizer": {"state": {}, "param_groups": groups}}
    )
    backward(model)
    assert optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd"])
def test_compressed_outer_gradients_train_nearly_as_well_as_uncompressed_ones(
    session: Session, compression: str
) -> None:
    reference, net = network(0), network(0)
    plain = torch.optim.AdamW(reference.parameters(), 0.02, weight_decay=0.1)
    model, optimizer = distributed(
        net, outer=averaging, inner_steps=2, gradient_compression=compression
    )
    data = problem()
    for begin in range(0, len(data), 8):
        x, y = data[begin : begin + 8]
        for each, stepped in ((model, optimizer), (reference, plain)):
            nn.functional.mse_loss(each(x), y).backward()
            stepped.step()
            stepped.zero_grad()
    x, y = data[:]
    with torch.no_grad():
        ours, theirs, untrained = (
            float(nn.functional.mse_loss(each(x), y)) for each in (net, reference, network(0))
        )
    assert abs(ours - theirs) < 0.2 * (untrained - theirs)


def test_non_contiguous_parameters_train_like_others(
    session: Session,
) -> None:
    """Non-contiguous parameters are copied through host memory, like parameters on a device."""
    reference, net = network(0), network(0)
    net[0].weight = nn.Parameter(net[0].weight.detach().t().contiguous().t())
    assert not net[0].weight.is_contiguous()
    plain = torch.optim.AdamW(reference.parameters(), 0.02, weight_decay=0.1)
    model, optimizer = distributed(net, outer=averaging, inner_steps=2)
    for _ in range(5):
        for each, stepped in ((model, optimizer), (reference, plain)):
            backward(each)
            stepped.step()
            stepped.zero_grad()
        assert_equal_values(net, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_train_too(session: Session, dtype: torch.dtype) -> None:
    net = nn.Linear(FEATURES, 1).to(dtype)
    before = net.weight.detach().clone()
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        strategy="async_sgd",
        inner_steps=2,
        outer_optimizer=averaging(net.parameters()),
    )
    for _ in range(2):
        model(torch.ones(4, FEATURES, dtype=dtype)).square().mean().backward()
        assert optimizer.step()
    assert not torch.equal(net.weight, before)
    assert net.weight.dtype is dtype


def test_outer_optimizer_of_other_parameters_or_unsupported_by_servers_is_refused(
    session: Session, running: AsyncCluster
) -> None:
    net = network(0)
    with pytest.raises(
        ConfigurationError, match=r"outer_optimizer=SGD .* only one of the two: 0\.bias, 2\.bias"
    ):
        distributed(
            net, outer=lambda _: torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], 0.7)
        )
    assert not any(server.look().HasField("optimizer") for server in running.servers)


def test_outer_optimizer_unsupported_by_servers_is_refused(session: Session) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"outer_optimizer=torch\.optim\.adamax\.Adamax: with async_sgd the parameter servers "
        r"run",
    ):
        distributed(network(0), outer=torch.optim.Adamax)


def test_step_hooks_of_an_outer_optimizer_run_by_servers_are_refused(
    session: Session,
) -> None:
    net = network(0)
    outer = averaging(net.parameters())
    model, optimizer = distributed(net, outer=lambda _: outer, inner_steps=1)
    backward(model)
    optimizer.step()
    backward(model)
    outer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"outer_optimizer=SGD has a step hook"):
        optimizer.step()


def test_an_outer_optimizer_that_has_a_step_hook_is_refused(session: Session) -> None:
    net = network(0)
    outer = averaging(net.parameters())
    outer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"outer_optimizer=SGD has a step hook"):
        distributed(net, outer=lambda _: outer)


def test_any_optimizer_may_be_the_inner_one(session: Session, running: AsyncCluster) -> None:
    net = network(0)
    inner = torch.optim.Adamax(net.parameters())
    model, optimizer = shoal.as_distributed(
        net, inner, strategy="async_sgd", inner_steps=1, outer_optimizer=averaging(net.parameters())
    )
    backward(model)
    assert optimizer.step()
    assert versions(running) == {2}


def test_workers_with_other_outer_optimizers_are_refused(
    session: Session, running: AsyncCluster
) -> None:
    distributed(network(0))
    other = running.start_worker(options={"inner_steps": 3}, outer={"lr": 0.5})
    assert other.process.wait() != 0
    assert (
        "use SetHyperparameters to change a running optimizer, or use another job"
        in other.process.said()
    )


def test_pull_does_not_overwrite_the_progress_of_a_round(session: Session) -> None:
    """During the round, another loader of the script may reach the end of its epoch, where values
    are pulled."""
    net = network(0)
    model, optimizer = distributed(net)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    moved = [parameter.detach().clone() for parameter in net.parameters()]
    model.engine.pull()
    assert all(
        torch.equal(before, after) for before, after in zip(moved, net.parameters(), strict=True)
    )


class Signs(torch.optim.SGD):
    """A user's own optimizer, with a method that writes parameters."""

    @torch.no_grad()
    def halve(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def test_hooks_and_methods_of_an_optimizer_that_the_worker_runs_work_as_in_torch(
    session: Session,
) -> None:
    seen = []
    results = []
    for elastic in (False, True):
        net = network(0)
        model, optimizer = net, Signs(net.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_, ours=elastic: seen.append(ours))
        if elastic:
            model, optimizer = shoal.as_distributed(
                net,
                optimizer,
                strategy="async_sgd",
                inner_steps=3,
                outer_optimizer=averaging(net.parameters()),
            )
        for step in range(6):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                optimizer.halve()
        results.append(net)
    assert seen == [False] * 6 + [True] * 6
    assert_equal_values(*results)
