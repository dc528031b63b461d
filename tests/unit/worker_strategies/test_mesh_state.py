"""The state of a model that is sharded over several ranks can be saved, loaded, and resumed under
other strategies and on another number of ranks. Also tests the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.elastic.contract.loader_interface import StateLostError
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.mesh.layouts import Axes, Coordinate
from shoal_worker.mesh.resharding import MeshCut, RankParts, gather

from tests.unit.worker_strategies import mesh_models as models

MATRIX = pytest.mark.matrix
GRID = {"strategy": "hybrid", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
FSDP = {"strategy": "hybrid", "tensor_parallel_size": 2, "data_parallel_strategy": "fsdp"}
IN_SHARDS = {"strategy": "hybrid", "pipeline_parallel_size": 2, "data_parallel_strategy": "zero2"}


def distribute(**options: Any) -> tuple[Any, Any]:
    """Distributes the model with two parameter groups, so that the optimizer's parameter order
    differs from the model's."""
    net = models.make()
    biases, others = (
        [p for p in net.parameters() if p.dim() == 1],
        [p for p in net.parameters() if p.dim() > 1],
    )
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}]
    return shoal.as_distributed(
        net, torch.optim.AdamW(groups, 0.01), minimum_parameter_group_size=64, **options
    )


def run(
    directory: Path, epochs: int, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[float], list[bool]]:
    """Runs a training script that resumes from `directory` and saves a checkpoint after each
    epoch."""
    model, optimizer = distribute(**options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    shoal.register_state(scheduler=scheduler)
    loader = shoal.ElasticDataLoader(models.data(), global_batch_size=models.BATCH, seed=3)
    shoal.resume(directory)
    stops = []
    for epoch in loader.epochs(epochs):
        for x, y in loader:
            model.train_step(x, y, models.loss_of)
            if optimizer.step():
                scheduler.step()
            optimizer.zero_grad()
        stops.append(optimizer.should_early_stop(float(epoch), patience=1))
        shoal.save_checkpoint(directory)
    return model.full_state_dict(), optimizer.state_dict(), scheduler.get_last_lr(), stops


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, {"strategy": "tensor"}), (4, GRID)),
        pytest.param((4, GRID), (3, {"strategy": "zero3"}), marks=MATRIX),
        pytest.param((2, {"strategy": "zero1"}), (2, {"strategy": "pipeline"}), marks=MATRIX),
        pytest.param((3, {"strategy": "pipeline"}), (1, {"strategy": "tensor"}), marks=MATRIX),
        ((4, IN_SHARDS), (2, {"strategy": "zero3"})),
        pytest.param((2, {"strategy": "ddp"}), (4, IN_SHARDS), marks=MATRIX),
        pytest.param((4, FSDP), (2, {"strategy": "ddp"}), marks=MATRIX),
        pytest.param((2, {"strategy": "zero3"}), (4, FSDP), marks=MATRIX),
    ],
)
def test_run_resumes_under_another_strategy_on_other_ranks(
    tmp_path: Path, first: tuple[int, Any], second: tuple[int, Any]
) -> None:
    ((expected, expected_state, rates, stops),) = shoal.launch(
        lambda: run(tmp_path / "one", 2, strategy="ddp"), world_size=1
    )
    shoal.launch(lambda: run(tmp_path / "several", 1, **first[1]), world_size=first[0])
    for state, optimizer_state, own_rates, own_stops in shoal.launch(
        lambda: run(tmp_path / "several", 2, **second[1]), world_size=second[0]
    ):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
        for number, own in expected_state["state"].items():
            torch.testing.assert_close(optimizer_state["state"][number], own, rtol=0, atol=1e-10)
        assert own_rates == rates
        assert own_stops == stops[1:]


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {"strategy": "tensor"}), pytest.param(4, GRID, marks=MATRIX), (4, IN_SHARDS), (4, FSDP)],
)
def test_saved_and_read_state_is_unsharded(
    tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    def rank() -> None:
        model, optimizer = distribute(**options)
        x, y = models.data()[:8]
        for _ in range(2):
            model.train_step(x, y, models.loss_of)
            optimizer.step()
            optimizer.zero_grad()
        whole, state, image = model.full_state_dict(), optimizer.state_dict(), model.serialize()
        plain, assembled = models.make(), dict[str, Any]()
        plain.load_state_dict(whole)
        assert list(model.gather_full_parameters()) == [
            name for name, _ in plain.named_parameters()
        ]
        assert len(model.full_state_dict(rank0_only=True)) == (
            len(whole) if shoal.rank() == 0 else 0
        )
        torch.testing.assert_close(model.clone()(x), plain(x))

        model.with_parameters({"norm.bias": torch.ones(16)})
        assert model.gather_full_parameters()["norm.bias"].eq(1).all()
        model.with_parameters(torch.zeros(sum(p.numel() for p in plain.parameters())))
        assert not any(p.any() for p in model.gather_full_parameters().values())
        model.deserialize(image)
        optimizer.deserialize(optimizer.serialize())
        optimizer.load_state_dict(state)
        model.save_model(tmp_path / "model.safetensors")
        model.load_model(tmp_path / "model.safetensors")
        with pytest.raises(CorruptDataError, match="belongs to a different model"):
            model.load_full({"norm.bias": torch.ones(16)})
        assert all(value.equal(whole[name]) for name, value in model.full_state_dict().items())
        torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)

        session = current_session()
        session.operation(
            "checkpoint", lambda channel: assembled.update(model.engine.assemble(channel))
        )
        assert list(assembled) == (["model", "optimizer"] if shoal.rank() == 0 else []), (
            "only rank 0 assembles the full state"
        )

        held = sum(p.numel() for p in model.local_shard.values())
        assert held < sum(p.numel() for p in plain.parameters())
        metadata = model.get_model_metadata()
        assert (metadata["strategy"], metadata["world_size"]) == (options["strategy"], world)
        assert metadata["parameters"] == sum(p.numel() for p in plain.parameters())
        assert set(model.get_gradients()) <= set(model.local_shard)

    shoal.launch(rank, world_size=world)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "tensor"},
        {"strategy": "hybrid", "data_parallel_strategy": "zero1"},
        {"strategy": "hybrid", "data_parallel_strategy": "fsdp"},
    ],
)
def test_grad_scaler_unscales_on_all_ranks_and_skips_overflows(
    options: dict[str, Any],
) -> None:
    def rank() -> Any:
        model, optimizer = distribute(**options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        x, y = models.data()[:8]
        norms = []
        for factor in (1.0, float("inf"), 1.0):
            before = model.full_state_dict()["norm.weight"]
            scaler.scale(models.loss_of(model(x), y) * factor).backward()
            scaler.unscale_(optimizer)
            norms.append(float(model.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert model.full_state_dict()["norm.weight"].equal(before) == (factor != 1.0)
        return norms, scaler.get_scale()

    (norms, scale), other = shoal.launch(rank, world_size=2)
    assert str(other) == str((norms, scale))
    assert scale == 4.0
    plain = models.make()
    models.loss_of(plain(models.data()[:8][0]), models.data()[:8][1]).backward()
    assert norms[0] == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))


@pytest.mark.parametrize(
    "options", [{"strategy": "zero3"}, {"strategy": "hybrid", "data_parallel_strategy": "fsdp"}]
)
def test_grad_scaler_on_a_rank_without_samples_finds_the_summed_gradients_of_the_others(
    options: dict[str, Any],
) -> None:
    def rank() -> torch.Tensor:
        model, optimizer = distribute(**options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x, y in shoal.ElasticDataLoader(models.data(), global_batch_size=2, shuffle=False):
            scaler.scale(models.loss_of(model(x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.full_state_dict()["head.weight"]

    (expected,) = shoal.launch(rank, world_size=1)
    for own in shoal.launch(rank, world_size=3):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


def test_a_grad_scaler_with_a_pipeline_is_refused() -> None:
    def rank() -> None:
        model, optimizer = distribute(strategy="pipeline")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        model.train_step(*models.data()[:8], models.loss_of)
        scaler.step(optimizer)

    with pytest.raises(ConfigurationError, match="a GradScaler with a pipeline"):
        shoal.launch(rank, world_size=2)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"strategy": "tensor"}, marks=MATRIX), pytest.param(GRID, marks=MATRIX)],
)
def test_autocast_computes_in_bfloat16_and_gradients_match_one_process(
    options: dict[str, Any],
) -> None:
    def rank() -> Any:
        net = models.make(dtype=torch.float32)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), minimum_parameter_group_size=64, **options
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.train_step(*models.data()[:8], models.loss_of)
        optimizer.step()
        return model.full_state_dict()

    plain, (x, y) = models.make(dtype=torch.float32), models.data()[:8]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        models.loss_of(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for state in shoal.launch(rank, world_size=4 if options is GRID else 2):
        for name, value in plain.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"gradient_compression": "bf16"},
            "strategy='hybrid' does not support gradient_compression=",
        ),
        (
            {"offload": "cpu"},
            "offload='cpu' with strategy='hybrid', which does not support this setting",
        ),
        ({"param_dtype": torch.bfloat16}, "param_dtype=torch.bfloat16 with strategy='hybrid'"),
    ],
)
def test_settings_that_do_not_apply_are_refused_by_name(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shoal.launch(lambda: distribute(**GRID, **setting), world_size=4)


def test_shard_missing_on_its_rank_and_its_mirror_holder_is_lost() -> None:
    def unused(axes: Axes) -> Any:
        pytest.fail(f"lost shards were searched for in {axes}")

    cut = MeshCut(
        number=3,
        axes=Axes(pipeline=1, tensor=1, data=3),
        at=Coordinate(0, 0, 0),
        shards=3,
        mirrored=2,
    )
    with pytest.raises(StateLostError, match="no rank holds 1 of the model's 3 shards"):
        next(gather(LocalChannel(), [RankParts(cut=cut, runs={})], unused))
