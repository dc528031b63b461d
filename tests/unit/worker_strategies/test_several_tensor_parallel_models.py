"""Several tensor-parallel models, each with its own plan, train as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.mesh.layouts import Axes, Layouts, plan_along, template_of
from shoal_worker.torch_internals import needs_torch
from torch import nn

from tests.unit.worker_strategies.test_several_models import BATCH, dataset, loss_of, optimizers_of

SMALL = {"minimum_parameter_group_size": 16}
"""Splits all layers except the last one of the discriminator, which is smaller."""
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "tensor": ("tensor", SMALL, 2),
    "two_replicas": (
        "tensor",
        {**SMALL, "tensor_parallel_size": 2, "consistency_check_every": 1},
        4,
    ),
    **{
        f"hybrid_{along_data}": (
            "hybrid",
            {**SMALL, "tensor_parallel_size": 2, "data_parallel_strategy": along_data},
            4,
        )
        for along_data in ("ddp", "zero1", "zero2", "fsdp")
    },
    "hybrid_data": ("hybrid", {"data_parallel_strategy": "zero2"}, 2),
}
"""Strategy, options and number of ranks by layout name."""


def make(kind: str) -> tuple[nn.Module, nn.Module]:
    """Returns a generator and a discriminator. If `kind` contains "norms", the generator has a
    BatchNorm layer, and the position of its last layer changes."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if "norms" in kind else []
    return (
        nn.Sequential(nn.Linear(3, 8), *norm, nn.Tanh(), nn.Linear(8, 4)).double(),
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
    )


def take(
    models: Any, optimizers: Any, real: torch.Tensor, noise: torch.Tensor, kind: str, number: int
) -> list[Any]:
    """Trains on one batch and returns the results of the optimizers' steps.

    kind: "generator_first" steps the generator first; "seldom" steps it for every third batch only;
    "frozen" freezes the discriminator during the generator's passes; "attached" lets the
    discriminator's loss leave gradients in the generator; "cleared" clears gradients after the
    steps instead of before the passes.
    """
    generator, discriminator = models
    outcomes = []

    def discriminate() -> None:
        if kind == "frozen":
            discriminator.requires_grad_(True)
        if "cleared" not in kind:
            optimizers[1].zero_grad()
        made = generator(noise)
        (
            loss_of(discriminator(real), 1.0)
            + loss_of(discriminator(made if kind == "attached" else made.detach()), 0.0)
        ).backward()
        outcomes.append(optimizers[1].step())
        if "cleared" in kind:
            optimizers[1].zero_grad()

    def generate() -> None:
        if kind == "frozen":
            discriminator.requires_grad_(False)
        if "cleared" not in kind:
            optimizers[0].zero_grad()
        loss_of(discriminator(generator(noise)), 1.0).backward()
        outcomes.append(optimizers[0].step())
        if "cleared" in kind:
            [optimizer.zero_grad() for optimizer in optimizers]

    order = [generate, discriminate] if kind == "generator_first" else [discriminate, generate]
    for update in order:
        if update is discriminate or kind != "seldom" or number % 3 == 0:
            update()
    return outcomes


def plain(kind: str) -> list[torch.Tensor]:
    models = make(kind)
    optimizers = optimizers_of(*models)
    batches = zip(*(tensor.split(BATCH) for tensor in dataset().tensors), strict=True)
    for number, (real, noise) in enumerate([*batches] * 2):
        take(models, optimizers, real, noise, kind, number)
    return [value.detach() for model in models for value in model.state_dict().values()]


def distributed(layout: str, kind: str) -> tuple[list[torch.Tensor], list[Any]]:
    torch.set_num_threads(1)
    strategy, options, _ = LAYOUTS[layout]
    if kind == "checkpointed":
        options = {**options, "activation_checkpointing": [nn.Linear]}
    models = make(kind)
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    outcomes = []
    for _ in loader.epochs(2):
        for real, noise in loader:
            outcomes.append(take(models, optimizers, real, noise, kind, loader.global_step))
    return [value for model in models for value in model.full_state_dict().values()], outcomes


ALL = [*LAYOUTS]
CASES = [
    *((layout, "") for layout in ALL),
    *(
        (layout, kind)
        for layout in ("tensor", "hybrid_fsdp")
        for kind in ("generator_first", "frozen", "attached", "seldom", "cleared")
    ),
    *((layout, "checkpointed") for layout in ("tensor", "hybrid_zero2")),
    ("tensor", "norms"),
    ("tensor", "norms cleared"),
]


QUICK = {
    ("tensor", ""),
    ("two_replicas", ""),
    ("hybrid_zero2", ""),
    ("hybrid_fsdp", ""),
    ("tensor", "seldom"),
    ("tensor", "norms cleared"),
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES],
)
def test_several_models_end_as_in_plain_pytorch(layout: str, kind: str) -> None:
    expected = plain(kind)
    for values, outcomes in shoal.launch(distributed, layout, kind, world_size=LAYOUTS[layout][2]):
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)
        assert outcomes[0] == [StepStatus.PENDING, StepStatus.COMMITTED]


def by_hand(_: int) -> list[torch.Tensor]:
    """Trains in a loop without Shoal's loader: both ranks of the single replica take the whole
    batch."""
    torch.set_num_threads(1)
    models = make("")
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy="tensor", **SMALL
    )
    batches = [*zip(*(tensor.split(BATCH) for tensor in dataset().tensors), strict=True)]
    for number, batch in enumerate(batches * 2):
        take(models, optimizers, *batch, "", number)
    return [value for model in models for value in model.full_state_dict().values()]


def test_a_loop_without_a_loader_ends_as_in_plain_pytorch() -> None:
    for values in shoal.launch(by_hand, 0, world_size=2):
        for value, other in zip(values, plain(""), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11)


def evaluated(layout: str) -> tuple[float, float]:
    """Evaluates the discriminator before each epoch. Returns the last result and the output of a
    clone taken after training."""
    torch.set_num_threads(1)
    strategy, options, _ = LAYOUTS[layout]
    models = make("")
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, shuffle=False)
    validation = shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH, train=False)
    for _ in loader.epochs(2):
        result = shoal.evaluate(
            models[1], validation, lambda model, batch: {"sum": float(model(batch[0]).sum())}
        )["sum"]
        for number, batch in enumerate(loader):
            take(models, optimizers, *batch, "", number)
    discriminator = models[1].clone()
    return result, float(discriminator(dataset().tensors[0]).detach().sum())


@pytest.mark.parametrize("layout", ["tensor", "hybrid_zero2"])
def test_a_model_is_evaluated_between_epochs(layout: str) -> None:
    models = make("")
    optimizers, sums = optimizers_of(*models), []
    for _ in range(2):
        sums.append(float(models[1](dataset().tensors[0]).detach().sum()))
        for number, batch in enumerate(
            zip(*(tensor.split(BATCH) for tensor in dataset().tensors), strict=True)
        ):
            take(models, optimizers, *batch, "", number)
    sums.append(float(models[1](dataset().tensors[0]).detach().sum()))
    for result in shoal.launch(evaluated, layout, world_size=LAYOUTS[layout][2]):
        assert result == pytest.approx(sums[1:], rel=1e-8)


def planned(given: Any) -> list[int]:
    """Trains with one plan per model. Returns the number of elements of each model's first weight
    that this rank owns."""
    models = make("")
    models, optimizers = shoal.as_distributed(
        models, optimizers_of(*models), strategy="tensor", plan=given, **SMALL
    )
    for number, batch in enumerate(shoal.ElasticDataLoader(dataset(), global_batch_size=BATCH)):
        take(models, optimizers, *batch, "", number)
    return [model.local_shard["0.weight"].numel() for model in models]


def test_each_model_is_split_by_its_own_plan() -> None:
    assert shoal.launch(planned, ({"0": "replicate"}, None), world_size=2) == [[24, 16]] * 2
    assert shoal.launch(planned, (None, {"0": "replicate"}), world_size=2) == [[12, 32]] * 2


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(
    ("option", "value"),
    [("plan", {"0": "replicate"}), ("example_inputs", (torch.ones(1, 3), torch.ones(1, 4)))],
)
def test_layer_settings_are_given_for_each_model(option: str, value: Any) -> None:
    models = make("")
    with pytest.raises(
        ConfigurationError, match=f"{option}=.* with 2 models: expected a tuple of 2"
    ):
        shoal.as_distributed(models, optimizers_of(*models), strategy="tensor", **{option: value})


@pytest.mark.usefixtures("fresh_session")
def test_several_models_in_pipeline_stages_are_refused() -> None:
    models = make("")
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size=2 with several models"):
        shoal.as_distributed(
            models, optimizers_of(*models), strategy="hybrid", pipeline_parallel_size=2
        )


def too_small(_: int) -> str:
    """Distributes two models of which the second has a single row and cannot be split. Returns the
    error."""
    models = (nn.Linear(3, 8), nn.Linear(8, 1))
    try:
        shoal.as_distributed(
            models, optimizers_of(*models), strategy="tensor", minimum_parameter_group_size=1
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def test_model_that_cannot_be_split_over_the_ranks_is_refused_in_any_position() -> None:
    for message in shoal.launch(too_small, 0, world_size=2):
        assert "its 1 rows, in pieces of 1, leave at least one of 2 ranks without rows" in message


def test_ranks_are_divided_so_that_every_model_can_be_split() -> None:
    needs_torch(2, 12, "tensor parallelism", "leave it out")

    def layouts_of(rows: int) -> Layouts:
        config = ShardingConfiguration(minimum_parameter_group_size=1)
        plan = plan_along(
            "tensor_parallel_size",
            {},
            lambda size, data: Axes(pipeline=1, tensor=size, data=data),
            pipelined=False,
            cuts_parameters=True,
        )
        return Layouts(plan, template_of(nn.Linear(3, rows), config, {}, pipelined=False))

    wide, narrow = layouts_of(8), layouts_of(4)
    assert [each.axes(3).tensor for each in (wide, narrow)] == [3, 2]
    for each in (wide, narrow):
        each.divide_alike([wide, narrow])
    assert [each.axes(3) for each in (wide, narrow)] == [Axes(pipeline=1, tensor=2, data=1)] * 2
