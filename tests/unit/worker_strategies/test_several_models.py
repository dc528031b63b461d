"""Training several models in one loop gives the same result as plain PyTorch. Usage that would
train them differently is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.session.worker_process import set_session
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH = 48, 12
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "hybrid"]


def make(*, norms: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    hidden = [
        nn.Linear(3, 8),
        *([nn.SyncBatchNorm(8)] if norms else []),
        nn.Tanh(),
        nn.Linear(8, 4),
    ]
    judge = [nn.Linear(4, 8), *([nn.SyncBatchNorm(8)] if norms else []), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*hidden).double(), nn.Sequential(*judge).double()


def optimizers_of(*models: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(torch.optim.AdamW(model.parameters(), 1e-2) for model in models)


def dataset() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(
        *(torch.randn(SAMPLES, width, generator=random, dtype=torch.float64) for width in (4, 3))
    )


def loss_of(logits: torch.Tensor, truth: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


def take(
    models: Any,
    optimizers: Any,
    real: torch.Tensor,
    noise: torch.Tensor,
    *,
    generator_first: bool,
    both: bool,
) -> list[Any]:
    """Trains on one batch and returns the results of the optimizers' steps."""
    generator, discriminator = models

    def discriminate() -> Any:
        optimizers[1].zero_grad()
        (
            loss_of(discriminator(real), 1.0)
            + loss_of(discriminator(generator(noise).detach()), 0.0)
        ).backward()
        return optimizers[1].step()

    def generate() -> Any:
        optimizers[0].zero_grad()
        loss_of(discriminator(generator(noise)), 1.0).backward()
        return optimizers[0].step()

    if not both:
        return [discriminate()]
    return [generate(), discriminate()] if generator_first else [discriminate(), generate()]


def plain(*, generator_first: bool, every: int) -> list[torch.Tensor]:
    models = make()
    optimizers = optimizers_of(*models)
    batches = zip(*(tensor.split(BATCH) for tensor in dataset().tensors), strict=True)
    for number, (real, noise) in enumerate([*batches] * 2):
        take(
            models,
            optimizers,
            real,
            noise,
            generator_first=generator_first,
            both=number % every == 0,
        )
    return [value.detach() for model in models for value in model.state_dict().values()]


def distributed(
    strategy: str, generator_first: bool, every: int
) -> tuple[list[torch.Tensor], list[Any]]:
    torch.set_num_threads(1)
    models = make()
    models, optimizers = shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    outcomes = []
    for _ in loader.epochs(2):
        for real, noise in loader:
            both = loader.global_step % every == 0
            outcomes.append(
                take(models, optimizers, real, noise, generator_first=generator_first, both=both)
            )
    return [value for model in models for value in model.full_state_dict().values()], outcomes


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("generator_first", "every"), [(False, 1), (True, 1), (False, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_models_end_as_in_plain_pytorch(
    strategy: str, generator_first: bool, every: int, world_size: int
) -> None:
    expected = plain(generator_first=generator_first, every=every)
    for values, outcomes in shoal.launch(
        distributed, strategy, generator_first, every, world_size=world_size
    ):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)
        assert outcomes[0] == [StepStatus.PENDING, StepStatus.COMMITTED]
        assert not outcomes[0][0]


def train_with_norms(strategy: str) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    models = make(norms=True)
    models, optimizers = shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=True)
    return [value for model in models for value in model.full_state_dict().values()]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_layers_that_communicate_do_so_after_an_update_too(strategy: str) -> None:
    (expected,) = shoal.launch(train_with_norms, strategy, world_size=1)
    for values in shoal.launch(train_with_norms, strategy, world_size=2):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-9)


def prepared(strategy: str = "ddp") -> tuple[Any, Any, Any]:
    models = make()
    models, optimizers = shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)
    return (
        models,
        optimizers,
        shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False),
    )


def parameters_of(model: Any) -> list[torch.Tensor]:
    return [value.clone() for value in model.full_state_dict().values()]


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_update_of_an_abandoned_batch_is_undone(strategy: str, tmp_path: Any) -> None:
    models, optimizers, loader = prepared(strategy)
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=True)
        break
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.5)
    before, state = parameters_of(models[1]), optimizers[1].state_dict()["state"]
    steps = [float(each["step"]) for each in state.values()]
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=False)
        scheduler.step()
        break
    assert (scheduler.last_epoch, scheduler.get_last_lr(), optimizers[1].param_groups[0]["lr"]) == (
        0,
        [1e-2],
        1e-2,
    )
    assert all(
        torch.equal(one, other) for one, other in zip(parameters_of(models[1]), before, strict=True)
    )
    shoal.save_checkpoint(tmp_path)
    scheduler.step()
    assert scheduler.last_epoch == 1, "a scheduler step after the loop counts"
    assert [float(each["step"]) for each in optimizers[1].state_dict()["state"].values()] == steps
    assert all(
        torch.equal(one, other) for one, other in zip(parameters_of(models[1]), before, strict=True)
    )


@pytest.mark.usefixtures("fresh_session")
def test_a_second_step_for_a_batch_is_refused() -> None:
    models, optimizers, loader = prepared()
    batches = iter(loader)
    take(models, optimizers, *next(batches), generator_first=False, both=False)
    with pytest.raises(PreconditionError, match="a second time for one batch"):
        optimizers[1].step()


@pytest.mark.usefixtures("fresh_session")
def test_step_after_the_last_one_is_refused_with_the_next_batch() -> None:
    models, optimizers, loader = prepared()

    def loop() -> None:
        for real, noise in loader:
            take(models, optimizers, real, noise, generator_first=False, both=True)
            take(models, optimizers, real, noise, generator_first=False, both=False)

    with pytest.raises(PreconditionError, match="stepped twice for one batch"):
        loop()


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("call", [lambda: shoal.save_checkpoint("nowhere"), shoal.barrier])
def test_operations_between_two_updates_are_refused(call: Callable[[], None]) -> None:
    models, optimizers, loader = prepared()
    batches = iter(loader)
    take(models, optimizers, *next(batches), generator_first=False, both=False)
    with pytest.raises(PreconditionError, match="inside a step"):
        call()


@pytest.mark.usefixtures("fresh_session")
def test_micro_batches_are_refused() -> None:
    models = make()
    (generator, _), _ = shoal.as_distributed(models, optimizers_of(*models))
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, micro_batch_size=4)
    with pytest.raises(
        ConfigurationError, match=r"several models do not support loader\.steps\(\)"
    ):
        generator(next(iter(next(iter(loader.steps()))))[1])


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("pipeline", "passes of the stages together"),
        ("local_sgd", "average parameters after a fixed number of steps"),
        ("async_sgd", "apply each update when it arrives"),
    ],
)
def test_other_strategies_explain_why_they_train_one_model(strategy: str, why: str) -> None:
    models = make()
    with pytest.raises(
        ConfigurationError,
        match=rf"2 models with strategy='{strategy}', which can train only one .*{why}.* ddp, ",
    ):
        shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)


@pytest.mark.usefixtures("fresh_session")
def test_a_batch_of_another_loader_between_two_updates_is_refused() -> None:
    models, optimizers, loader = prepared()
    other = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, name="other")
    batches = iter(loader)
    take(models, optimizers, *next(batches), generator_first=False, both=False)
    with pytest.raises(
        PreconditionError, match="another loader was requested between the steps of two optimizers"
    ):
        next(iter(other))


def across_an_update(strategy: str, options: dict[str, Any]) -> str:
    """Backpropagates the generator's loss through a pass of the discriminator that was made before
    the discriminator's step. Returns the error."""
    torch.set_num_threads(1)
    models = make()
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy=strategy, **options
    )
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    for real, noise in shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False):
        logits = discriminator(generator(noise))
        of_discriminator.zero_grad()
        (loss_of(discriminator(real), 1.0) + loss_of(logits.detach(), 0.0)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        try:
            loss_of(logits, 1.0).backward()
        except PreconditionError as error:
            return str(error)
        of_generator.step()
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "tensor"])
def test_gradients_through_a_pass_from_before_the_models_update_are_refused(strategy: str) -> None:
    options = {"minimum_parameter_group_size": 16} if strategy == "tensor" else {}
    for message in shoal.launch(across_an_update, strategy, options, world_size=2):
        assert "through a forward pass of model 1 that ran before its optimizer's step" in message


def predict_after_leaving(strategy: str, options: dict[str, Any]) -> bool:
    """Leaves a loop between two updates and predicts with the updated model. Returns whether the
    predictions are those from before the updates."""
    torch.set_num_threads(1)
    models = make()
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    real = torch.ones(2, 4, dtype=torch.float64)
    for batch in loader:
        take(models, optimizers, *batch, generator_first=False, both=True)
        break
    before = models[1].predict(real)
    for batch in loader:
        take(models, optimizers, *batch, generator_first=False, both=False)
        break
    return torch.equal(models[1].predict(real), before)


@pytest.mark.parametrize(
    ("strategy", "options", "world_size"),
    [
        *((strategy, {}, 2) for strategy in ("ddp", "zero2", "zero3")),
        ("tensor", {"minimum_parameter_group_size": 16}, 2),
        (
            "hybrid",
            {
                "minimum_parameter_group_size": 16,
                "tensor_parallel_size": 2,
                "data_parallel_strategy": "zero2",
            },
            4,
        ),
        (
            "hybrid",
            {
                "minimum_parameter_group_size": 16,
                "tensor_parallel_size": 2,
                "data_parallel_strategy": "fsdp",
            },
            4,
        ),
    ],
)
def test_model_computes_with_restored_values(
    strategy: str, options: dict[str, Any], world_size: int
) -> None:
    assert all(shoal.launch(predict_after_leaving, strategy, options, world_size=world_size))


@pytest.mark.usefixtures("fresh_session")
def test_each_model_needs_its_own_optimizer_and_parameters() -> None:
    models = make()
    with pytest.raises(ConfigurationError, match="2 models and 1 optimizers"):
        shoal.as_distributed(models, optimizers_of(models[0]))
    with pytest.raises(ConfigurationError, match="2 models and 0 optimizers"):
        shoal.as_distributed(models)
    shared = (models[0], nn.Sequential(models[0][0]))
    with pytest.raises(ConfigurationError, match="models 0 and 1 share the parameter"):
        shoal.as_distributed(shared, optimizers_of(*shared))


@pytest.mark.usefixtures("fresh_session")
def test_each_model_of_a_checkpoint_can_be_read_alone(tmp_path: Any) -> None:
    models, optimizers, loader = prepared()
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=True)
    shoal.save_checkpoint(tmp_path)
    shoal.shutdown()
    for number, model in enumerate(models):
        read = shoal.load_full_state(tmp_path, model=number)
        assert all(
            torch.equal(read[name], value) for name, value in model.module.state_dict().items()
        )
    for wrong in (None, 2, True):
        with pytest.raises(ConfigurationError, match="has 2 models, but model="):
            shoal.load_full_state(tmp_path, model=wrong)


@pytest.mark.usefixtures("fresh_session")
def test_fit_accepts_one_model_only() -> None:
    _, optimizers, _ = prepared()
    data = shoal.OptimizationInputData(training=dataset(), epochs=1, global_batch_size=BATCH)
    with pytest.raises(
        ConfigurationError, match="trains one model, but as_distributed received several"
    ):
        optimizers[0].optimize(data)


@pytest.mark.usefixtures("fresh_session")
def test_checkpoint_of_several_models_does_not_load_into_one(tmp_path: Any) -> None:
    models, optimizers, loader = prepared()
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=True)
    shoal.save_checkpoint(tmp_path)
    shoal.shutdown()
    set_session(None)
    net = make()[0]
    shoal.as_distributed(net, *optimizers_of(net))
    with pytest.raises(
        CorruptDataError, match="the state contains 2 models, but as_distributed received 1"
    ):
        shoal.resume(tmp_path)


def with_running_statistics(strategy: str, every: int) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = (
        nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double(),
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
    )
    optimizers = optimizers_of(*models)
    if strategy == "none":
        batches: Any = [*zip(*(tensor.split(BATCH) for tensor in dataset().tensors), strict=True)]
    else:
        models, optimizers = shoal.as_distributed(models, optimizers, strategy=strategy)
        batches = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    for number, (real, noise) in enumerate(batches):
        take(models, optimizers, real, noise, generator_first=False, both=number % every == 0)
    state = models[0].state_dict() if strategy == "none" else models[0].full_state_dict()
    return [state["1.running_mean"], state["1.running_var"], state["1.num_batches_tracked"]]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_buffers_of_a_model_that_is_not_updated_follow_its_passes(strategy: str) -> None:
    expected = with_running_statistics("none", 3)
    (alone,) = shoal.launch(with_running_statistics, strategy, 3, world_size=1)
    for value, other in zip(alone, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)
    first, second = shoal.launch(with_running_statistics, strategy, 3, world_size=2)
    for value, other, whole in zip(first, second, expected, strict=True):
        assert torch.equal(value, other)
        if value.dtype == torch.int64:
            assert torch.equal(value, whole)


def in_another_order(strategy: str) -> str:
    """Trains two identical models, whose gradients would fit each other, and steps their optimizers
    in a different order on each rank. Returns the error."""
    torch.manual_seed(0)
    models = (nn.Linear(3, 1).double(), nn.Linear(3, 1).double())
    models, optimizers = shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    order = (0, 1) if shoal.rank() == 0 else (1, 0)
    try:
        for _, noise in loader:
            for number in order:
                optimizers[number].zero_grad()
                models[number](noise).square().sum().backward()
                optimizers[number].step()
    except PreconditionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_ranks_that_step_optimizers_in_another_order_are_reported(strategy: str) -> None:
    for message in shoal.launch(in_another_order, strategy, world_size=2):
        assert (
            "rank 0 has stepped the optimizer of model 0, rank 1 has stepped the optimizer of "
            "model 1" in message
        )


@pytest.mark.usefixtures("fresh_session")
def test_gradients_that_a_batch_leaves_unused_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, optimizers, loader = prepared()
    for real, noise in loader:
        take(models, optimizers, real, noise, generator_first=False, both=False)
        loss_of(models[1](models[0](noise)), 1.0).backward()
    assert [
        record.message for record in caplog.records if "they were dropped" in record.message
    ] != []


def with_checkpointing(strategy: str) -> list[torch.Tensor]:
    models = make()
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy=strategy, activation_checkpointing=[nn.Linear]
    )
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    for _ in loader.epochs(2):
        for real, noise in loader:
            take(models, optimizers, real, noise, generator_first=False, both=True)
    return [value for model in models for value in model.full_state_dict().values()]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_activations_are_recomputed_after_an_update_too(strategy: str) -> None:
    expected = plain(generator_first=False, every=1)
    for values in shoal.launch(with_checkpointing, strategy, world_size=2):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)


def frozen_by_the_script(strategy: str, generator_first: bool) -> list[torch.Tensor]:
    """Trains the pair with the discriminator frozen during the generator's passes, as many scripts
    do to save its gradients."""
    models = make()
    models, optimizers = shoal.as_distributed(models, optimizers_of(*models), strategy=strategy)
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)

    def generate(noise: torch.Tensor) -> None:
        models[1].requires_grad_(False)
        optimizers[0].zero_grad()
        loss_of(models[1](models[0](noise)), 1.0).backward()
        optimizers[0].step()

    for _ in loader.epochs(2):
        for real, noise in loader:
            if generator_first:
                generate(noise)
            models[1].requires_grad_(True)
            optimizers[1].zero_grad()
            (
                loss_of(models[1](real), 1.0) + loss_of(models[1](models[0](noise).detach()), 0.0)
            ).backward()
            optimizers[1].step()
            if not generator_first:
                generate(noise)
    return [value for model in models for value in model.full_state_dict().values()]


@pytest.mark.parametrize("generator_first", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_model_may_be_frozen_for_the_passes_of_another(
    strategy: str, generator_first: bool
) -> None:
    expected = plain(generator_first=generator_first, every=1)
    for values in shoal.launch(frozen_by_the_script, strategy, generator_first, world_size=2):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("fresh_session")
def test_sparse_gradients_of_a_model_that_does_not_step_are_dropped_too() -> None:
    torch.manual_seed(0)
    models = (nn.Linear(4, 1).double(), nn.Embedding(8, 4, sparse=True).double())
    optimizers = (
        torch.optim.SGD(models[0].parameters(), 0.1),
        torch.optim.SGD(models[1].parameters(), 0.1),
    )
    (head, table), (of_head, _) = shoal.as_distributed(models, optimizers)
    before = parameters_of(table)
    loader = shoal.ElasticDataLoader(
        TensorDataset(torch.arange(8)), global_batch_size=4, shuffle=False
    )
    for (ids,) in loader:
        of_head.zero_grad()
        head(table(ids)).sum().backward()
        of_head.step()
    assert all(
        torch.equal(one, other) for one, other in zip(parameters_of(table), before, strict=True)
    )
