"""tensor, pipeline and hybrid train as one process does: parameters, optimizer state and evaluation
agree in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, MembershipChanged
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.engine.state.hidden_parameters import inside
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import TensorDataset

from tests.unit.worker_strategies import mesh_models as models

GRID = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
ZERO1, ZERO2, FSDP = ({"data_parallel_strategy": name} for name in ("zero1", "zero2", "fsdp"))
MATRIX = pytest.mark.matrix


def train(
    name: str, optimizer: str, micro: int | None, *, loop: bool, **options: Any
) -> tuple[Any, ...]:
    """Trains and evaluates on one rank and returns the results."""
    net, samples = models.make(name), models.data(name)
    model, stepper = shoal.as_distributed(
        net,
        models.OPTIMIZERS[optimizer](net.parameters()),
        minimum_parameter_group_size=64,
        **options,
    )
    loader = shoal.ElasticDataLoader(
        samples, global_batch_size=models.BATCH, micro_batch_size=micro, shuffle=False
    )
    for _ in loader.epochs(models.EPOCHS):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for x, y in step:
                if loop:
                    models.loss_of(model(x), y).backward()
                else:
                    model.train_step(x, y, models.loss_of)
            model.clip_grad_norm_(models.MAX_NORM)
            assert stepper.step()
            stepper.zero_grad()
    held = shoal.ElasticDataLoader(samples, global_batch_size=5, train=False)
    counted = shoal.evaluate(
        model, held, lambda m, batch: {"samples": len(batch[0]), "sum": m(batch[0]).sum()}
    )
    return (
        model.full_state_dict(),
        stepper.state_dict(),
        counted,
        model.predict(samples[:4][0]),
        type(model).__name__,
    )


@pytest.mark.parametrize(
    ("world", "name", "optimizer", "micro", "grouped", "options"),
    [
        (2, "gpt", "adamw", None, None, {"strategy": "tensor"}),
        pytest.param(4, "gpt", "sgd", None, None, {"strategy": "tensor"}, marks=MATRIX),
        pytest.param(
            3,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "tensor", "tensor_parallel_size": 1},
            marks=MATRIX,
        ),
        pytest.param(
            2,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "tensor", "sequence_dimension": 1},
            marks=MATRIX,
        ),
        pytest.param(
            2, "gpt", "sgd", None, None, {"strategy": "tensor", "loss_parallel": True}, marks=MATRIX
        ),
        pytest.param(
            4,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", **GRID, "loss_parallel": True},
            marks=MATRIX,
        ),
        pytest.param(
            4, "cnn", "adamw", 2, 2, {"strategy": "tensor", "tensor_parallel_size": 2}, marks=MATRIX
        ),
        pytest.param(1, "gpt", "adamw", None, None, {"strategy": "tensor"}, marks=MATRIX),
        (2, "gpt", "adamw", 2, None, {"strategy": "pipeline", "cut_points": ["blocks.0"]}),
        (
            4,
            "cnn",
            "sgd",
            None,
            2,
            {"strategy": "pipeline", "pipeline_parallel_size": 2, "micro_batches": 2},
        ),
        pytest.param(
            3, "gpt", "sgd", None, None, {"strategy": "pipeline", "schedule": "gpipe"}, marks=MATRIX
        ),
        (2, "gpt", "sgd", None, None, {"strategy": "pipeline", "schedule": "zero_bubble"}),
        pytest.param(1, "gpt", "adamw", None, None, {"strategy": "pipeline"}, marks=MATRIX),
        *(
            pytest.param(
                2,
                "gpt",
                "sgd",
                None,
                None,
                {"strategy": "pipeline", "schedule": schedule},
                marks=MATRIX,
            )
            for schedule in ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipe_v")
        ),
        (
            4,
            "gpt",
            "adamw",
            None,
            None,
            {"strategy": "hybrid", **GRID, "activation_checkpointing": [models.Block]},
        ),
        pytest.param(
            8,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", **GRID, "data_parallel_size": 2},
            marks=MATRIX,
        ),
        pytest.param(
            4,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", **GRID, "schedule": "zero_bubble"},
            marks=MATRIX,
        ),
        pytest.param(
            4,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2},
            marks=MATRIX,
        ),
        pytest.param(2, "gpt", "sgd", None, None, {"strategy": "hybrid"}, marks=MATRIX),
        pytest.param(
            4,
            "gpt",
            "adamw",
            2,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2, **ZERO1},
            marks=MATRIX,
        ),
        (3, "gpt", "adamw", 2, None, {"strategy": "hybrid", **ZERO2}),
        (
            4,
            "gpt",
            "sgd",
            2,
            None,
            {"strategy": "hybrid", "pipeline_parallel_size": 2, "schedule": "zero_bubble", **ZERO2},
        ),
        pytest.param(
            6,
            "gpt",
            "adamw",
            2,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2, **ZERO2},
            marks=MATRIX,
        ),
        pytest.param(
            8, "gpt", "adamw", None, None, {"strategy": "hybrid", **GRID, **ZERO1}, marks=MATRIX
        ),
        pytest.param(
            8, "gpt", "sgd", 2, None, {"strategy": "hybrid", **GRID, **ZERO2}, marks=MATRIX
        ),
        pytest.param(
            4,
            "cnn",
            "adamw",
            2,
            2,
            {"strategy": "hybrid", "tensor_parallel_size": 2, **ZERO2},
            marks=MATRIX,
        ),
        pytest.param(1, "gpt", "adamw", None, None, {"strategy": "hybrid", **ZERO1}, marks=MATRIX),
        (
            6,
            "gpt",
            "adamw",
            2,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2, "sequence_dimension": 1, **FSDP},
        ),
        (
            4,
            "gpt",
            "sgd",
            2,
            None,
            {"strategy": "hybrid", "pipeline_parallel_size": 2, "schedule": "zero_bubble", **FSDP},
        ),
        pytest.param(1, "gpt", "adamw", None, None, {"strategy": "hybrid", **FSDP}, marks=MATRIX),
        pytest.param(
            3,
            "gpt",
            "adamw",
            2,
            None,
            {"strategy": "hybrid", "shard_modules": ["blocks.0"], **FSDP},
            marks=MATRIX,
        ),
        pytest.param(
            4,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2, **FSDP},
            marks=MATRIX,
        ),
        pytest.param(
            4,
            "gpt",
            "adamw",
            2,
            None,
            {
                "strategy": "hybrid",
                "tensor_parallel_size": 2,
                "activation_checkpointing": [models.Block],
                **FSDP,
            },
            marks=MATRIX,
        ),
        pytest.param(
            4,
            "gpt",
            "sgd",
            None,
            None,
            {"strategy": "hybrid", "tensor_parallel_size": 2, "loss_parallel": True, **FSDP},
            marks=MATRIX,
        ),
        pytest.param(
            8, "gpt", "sgd", 2, None, {"strategy": "hybrid", **GRID, **FSDP}, marks=MATRIX
        ),
        pytest.param(
            4,
            "cnn",
            "adamw",
            2,
            2,
            {"strategy": "hybrid", "tensor_parallel_size": 2, **FSDP},
            marks=MATRIX,
        ),
    ],
)
def test_ranks_train_as_one_process_does(
    world: int,
    name: str,
    optimizer: str,
    micro: int | None,
    grouped: int | None,
    options: dict[str, Any],
) -> None:
    loop = (
        options["strategy"] != "pipeline"
        and "pipeline_parallel_size" not in options
        and optimizer == "adamw"
    )
    expected, expected_state = models.alone(name, optimizer, grouped or models.BATCH)
    close = {"rtol": 0, "atol": 1e-10}
    outputs = []
    for state, optimizer_state, counted, output, _ in shoal.launch(
        lambda: train(name, optimizer, micro, loop=loop, **options), world_size=world
    ):
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, **close, msg=lambda text, key=key: f"{key}: {text}"
            )
        assert optimizer_state["param_groups"] == expected_state["param_groups"]
        for number, own in expected_state["state"].items():
            for key, value in own.items():
                torch.testing.assert_close(optimizer_state["state"][number][key], value, **close)
        assert counted["samples"] == models.SAMPLES
        models.make(name).load_state_dict(state)
        outputs.append(output)
    plain = models.make(name)
    plain.load_state_dict(state)
    for output in outputs:
        torch.testing.assert_close(output, plain.eval()(models.data(name)[:4][0]), **close)


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (3, {"strategy": "tensor"}, "its 4 attention heads are not divisible by 3"),
        (
            3,
            {"strategy": "tensor", "tensor_parallel_size": 2},
            "which leaves 1 unused for the whole run; start a multiple of 2",
        ),
        (7, {"strategy": "pipeline"}, r"stages=7: Gpt has 4 blocks"),
        (2, {"strategy": "hybrid", **GRID}, "2 ranks form 0 replica.* start a multiple of 4"),
        (
            1,
            {"strategy": "hybrid", "data_parallel_strategy": "zero3"},
            "data_parallel_strategy='zero3': expected one of ddp, zero1",
        ),
        (
            2,
            {"strategy": "hybrid", "shard_modules": ["blocks.0"], **ZERO2},
            "shard_modules=.*'zero2'.* leave shard_modules out",
        ),
        (
            2,
            {"strategy": "hybrid", "prefetch_blocks": 2, **ZERO2},
            "prefetch_blocks=2 .*'zero2'.* leave prefetch_blocks out",
        ),
        (
            2,
            {"strategy": "hybrid", "shard_modules": ["nope"], **FSDP},
            "shard_modules='nope': the model has no such module",
        ),
        (
            2,
            {
                "strategy": "hybrid",
                "pipeline_parallel_size": 2,
                "shard_modules": ["blocks.0"],
                **FSDP,
            },
            "shard_modules=.* leave shard_modules out",
        ),
        (
            1,
            {"strategy": "hybrid", **GRID, "sequence_dimension": 1},
            "sequence_dimension=1 with pipeline_parallel_size=2",
        ),
        (
            1,
            {"strategy": "hybrid", "tensor_parallel_size": 0},
            "tensor_parallel_size=0: expected a number of ranks, at least 1",
        ),
        (
            2,
            {"strategy": "tensor", "deterministic": True},
            "deterministic=True cannot be used with strategy='tensor'",
        ),
        (2, {"strategy": "pipeline", "schedule": "2f2b"}, "schedule='2f2b': expected one of gpipe"),
        (2, {"strategy": "pipeline", "plan": {}}, "has no options \\['plan'\\]"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    world: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shoal.launch(lambda: train("gpt", "sgd", None, loop=False, **options), world_size=world)


def test_a_pipelines_forward_pass_in_training_names_train_step() -> None:
    with pytest.raises(ConfigurationError, match=r"loss = model\.train_step\(x, y, loss_fn\)"):
        shoal.launch(
            lambda: train("gpt", "adamw", None, loop=True, strategy="pipeline"), world_size=2
        )


@pytest.mark.parametrize(
    ("micro", "options"),
    [
        (None, {"micro_batches": 8}),
        pytest.param(4, {"schedule": "zero_bubble"}, marks=MATRIX),
        pytest.param(None, {"micro_batches": 8, "schedule": "zero_bubble"}, marks=MATRIX),
    ],
)
def test_micro_batches_of_a_pipeline_have_the_weights_of_weight_fn(
    micro: int | None, options: dict[str, Any]
) -> None:
    """A pipeline weights its micro-batches by `weight_fn`. Two of eight samples have no valid
    target, so the loss of a micro-batch with only one of them is NaN."""
    x, y = models.data()[:8]
    y = y.clone()
    y[:3, 1:], y[3:5] = -100, -100

    def rank() -> tuple[dict[str, torch.Tensor], float]:
        net = models.make()
        model, stepper = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy="pipeline", **options
        )
        loader = shoal.ElasticDataLoader(
            TensorDataset(x, y),
            global_batch_size=8,
            micro_batch_size=micro,
            weight_fn=lambda batch: float((batch[1] != -100).sum()),
        )
        for step in loader.steps():
            for inputs, targets in step:
                loss = model.train_step(inputs, targets, models.loss_of)
            assert stepper.step()
        return model.full_state_dict(), float(loss)

    net = models.make()
    expected = models.loss_of(net(x), y)
    expected.backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    for state, loss in shoal.launch(rank, world_size=2):
        for name, value in net.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-10)
        assert micro is not None or loss == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"strategy": "tensor"}),
        pytest.param(4, {"strategy": "hybrid", "tensor_parallel_size": 2}, marks=MATRIX),
    ],
)
def test_ranks_of_a_replica_draw_identically_without_a_loader(
    world: int, options: dict[str, Any]
) -> None:
    """Without a loader, the ranks of a replica draw the same random numbers, no matter which seeds
    the script sets. Different dropout on replicated activations would give different gradients."""
    x, y = models.data("cnn")[:8]

    def rank() -> tuple[list[float], torch.Tensor, int]:
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(36, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Dropout(0.5),
            nn.LayerNorm(8),
            nn.Linear(8, 5),
        )
        net.double()
        model, stepper = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 1.0), minimum_parameter_group_size=1, **options
        )
        torch.manual_seed(shoal.rank())
        drawn = []
        for _ in range(2):
            models.loss_of(model(x), y).backward()
            drawn.append(float(torch.rand(())))
            assert stepper.step()
            stepper.zero_grad()
        return drawn, model.local_shard["5.weight"].clone(), model.data_parallel_rank

    results = shoal.launch(rank, world_size=world)
    for drawn, norm, replica in results:
        torch.testing.assert_close(norm, results[0][1], rtol=0, atol=0)
        assert drawn[0] != drawn[1]
        assert (drawn == results[0][0]) == (replica == 0)


@pytest.mark.parametrize(
    "options", [{"strategy": "zero1"}, {"strategy": "zero3"}, {"strategy": "hybrid", **FSDP}]
)
def test_a_model_in_eval_mode_can_be_trained(options: dict[str, Any]) -> None:
    """A model in eval mode, which scripts use to freeze dropout and normalization layers, can be
    trained."""

    def rank() -> dict[str, torch.Tensor]:
        net = models.make()
        model, stepper = shoal.as_distributed(
            net,
            models.OPTIMIZERS["sgd"](net.parameters()),
            minimum_parameter_group_size=64,
            **options,
        )
        model.eval()
        for x, y in shoal.ElasticDataLoader(
            models.data(), global_batch_size=models.BATCH, shuffle=False
        ):
            models.loss_of(model(x), y).backward()
            assert stepper.step()
            stepper.zero_grad()
        return model.full_state_dict()

    (expected,) = shoal.launch(rank, world_size=1)
    for state in shoal.launch(rank, world_size=2):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def test_frozen_parameters_stay_sharded_after_the_first_step() -> None:
    def rank() -> list[int]:
        net = models.make()
        for parameter in net.blocks[0].parameters():
            parameter.requires_grad_(False)
        trained = [p for p in net.parameters() if p.requires_grad]
        model, stepper = shoal.as_distributed(
            net,
            models.OPTIMIZERS["sgd"](trained),
            minimum_parameter_group_size=64,
            strategy="hybrid",
            **FSDP,
        )
        held = []
        for step in shoal.ElasticDataLoader(
            models.data(), global_batch_size=models.BATCH, micro_batch_size=2
        ).steps():
            for x, y in step:
                models.loss_of(model(x), y).backward()
            assert stepper.step()
            with inside():
                held.append(sum(p.untyped_storage().nbytes() for p in model.module.parameters()))
        return held

    for held in shoal.launch(rank, world_size=2):
        assert held == [0] * len(held)


def test_weights_that_a_pipeline_cannot_split_are_refused_by_name() -> None:
    def rank(weight: Callable[[Any], float], rows: int) -> None:
        net = models.make()
        model, _ = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy="pipeline"
        )
        for x, y in shoal.ElasticDataLoader(models.data(), global_batch_size=8, weight_fn=weight):
            model.train_step(x[:rows], y[:rows], models.loss_of)

    with pytest.raises(
        ConfigurationError, match=r"weight_fn returned 3.0 for a batch, but .* weights that add up"
    ):
        shoal.launch(lambda: rank(lambda batch: 3.0, 8), world_size=2)
    with pytest.raises(
        ConfigurationError,
        match=r"received 6 rows, but the loader's batch has tensors of \[8\] rows",
    ):
        shoal.launch(lambda: rank(lambda batch: float(len(batch[0])), 6), world_size=2)


def test_aborted_step_reduces_no_gradients_over_an_ended_group() -> None:
    def lose() -> None:
        net = models.make()
        model, stepper = shoal.as_distributed(
            net,
            models.OPTIMIZERS["sgd"](net.parameters()),
            strategy="tensor",
            minimum_parameter_group_size=64,
        )
        for x, y in shoal.ElasticDataLoader(models.data(), global_batch_size=models.BATCH):
            models.loss_of(model(x), y).backward()
            model(x)  # leaves the parameters in a state that accepts unreduced gradients
            split = next(p for p in model.module.parameters() if isinstance(p, DTensor))
            split.grad = DTensor.from_local(
                torch.ones(split.shape, dtype=split.dtype),
                split.device_mesh,
                [Partial()],
                run_check=False,
            )
            session = current_session()
            assert session.group is not None
            session.group.abort("a peer is gone")
            session.lifecycle.mark_lost(MembershipChanged("a peer is gone"))
            stepper.step()

    with pytest.raises(MembershipChanged, match="its ranks can only continue together"):
        # raised by the session after the step
        shoal.launch(lose, world_size=2)


@pytest.mark.parametrize(
    "options",
    [{"strategy": "pipeline"}, {"strategy": "tensor"}, {"strategy": "hybrid", **ZERO2}],
    ids=lambda options: "-".join(options.values()),
)
def test_a_prediction_between_clipping_and_the_step_changes_nothing(
    options: dict[str, Any],
) -> None:
    def rank(*, predicts: bool) -> Any:
        net = models.make()
        model, optimizer = shoal.as_distributed(
            net,
            torch.optim.AdamW(net.parameters(), 0.01),
            minimum_parameter_group_size=64,
            **options,
        )
        x, y = models.data()[:8]
        for _ in range(2):
            model.train_step(x, y, models.loss_of)
            model.clip_grad_norm_(models.MAX_NORM)
            if predicts:
                model.predict(x)
            assert optimizer.step()
            optimizer.zero_grad()
        return model.full_state_dict()

    expected, *_ = shoal.launch(lambda: rank(predicts=False), world_size=2)
    for state in shoal.launch(lambda: rank(predicts=True), world_size=2):
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
