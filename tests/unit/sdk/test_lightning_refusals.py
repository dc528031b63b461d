"""Shoal's strategy for Lightning refuses unsupported uses before it trains, with a remedy for
each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# importing Lightning takes some seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_session"),
    pytest.mark.filterwarnings("ignore::Warning"),
]

DATA = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))


def fit(
    directory: Path,
    *,
    strategy: str = "ddp",
    options: dict[str, Any] | None = None,
    loader: Any = None,
    **arguments: Any,
) -> Any:
    """Fits a small module. Its class gets the attributes in `arguments["module"]`; the other
    arguments are the Trainer's."""
    import lightning
    from shoal.integrations.lightning import ShoalStrategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name, value in arguments.pop("module", {}).items():
        setattr(Net, name, value)
    named = {"ckpt_path": arguments.pop("ckpt_path")} if "ckpt_path" in arguments else {}
    common = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        strategy=ShoalStrategy(strategy, **(options or {})),
        default_root_dir=directory,
        **(common | arguments),  # type: ignore[arg-type]
    )
    trainer.fit(Net(), DataLoader(DATA, batch_size=4) if loader is None else loader, **named)
    return trainer


def two_optimizers(module: Any) -> Any:
    return [
        torch.optim.SGD(module.parameters(), lr=0.1),
        torch.optim.SGD(module.parameters(), lr=0.1),
    ]


def logs_a_median(module: Any, batch: Any, batch_idx: int) -> Any:
    loss = nn.functional.mse_loss(module.layer(batch[0]), batch[1])
    module.log("loss", loss, reduce_fx=torch.median, on_epoch=True)
    return loss


def updates_behind_the_step(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    module.error.update(module.layer(batch[0]), batch[1])


def adds_an_error(module: Any) -> None:
    from torchmetrics import MeanSquaredError

    module.error = MeanSquaredError()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"strategy": "tensor"},
            r"ShoalStrategy\('tensor'\): expected one of ddp, zero1, zero2, zero3, fsdp, hsdp",
        ),
        (
            {"devices": 2},
            "devices=2 is not supported by ShoalStrategy: each worker uses one device; .*"
            "`shoal run --nproc-per-node`",
        ),
        (
            {"limit_train_batches": 0},
            r"fit\(\) with limit_train_batches=0 is not supported by ShoalStrategy: nothing would "
            r"be trained",
        ),
        (
            {"limit_train_batches": 0.1},
            "limit_train_batches=0.1 of 2 batches is less than one batch; use at least 0.5",
        ),
        (
            {"precision": "64-true"},
            "precision='64-true' is not supported by ShoalStrategy: use '32-true' or 'bf16-mixed'",
        ),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm='value'.*use gradient_clip_algorithm='norm'",
        ),
        (
            {"max_time": "00:01:00:00"},
            "Timer is not supported by ShoalStrategy: workers with different clocks would stop",
        ),
        (
            {"ckpt_path": "last.ckpt"},
            r"Checkpoints\(directory, resume=True\), and omit ckpt_path",
        ),
        (
            {"options": {"deterministic": True}},
            "deterministic=True.* is not supported with accumulate_grad_batches=1",
        ),
        (
            {"module": {"automatic_optimization": False}},
            "automatic_optimization=False.*write your own loop",
        ),
        (
            {
                "module": {
                    "prepare_data": lambda module: None,
                    "prepare_data_per_node": property(lambda _: False, lambda *_: None),
                }
            },
            "Net.prepare_data_per_node=False.*prepare_data runs on each machine",
        ),
        (
            {"module": {"on_save_checkpoint": lambda module, checkpoint: None}},
            "on_save_checkpoint.*shoal.register_state",
        ),
        (
            {"module": {"configure_optimizers": two_optimizers}},
            "ShoalStrategy expects one|multiple optimizers",
        ),
        (
            {"module": {"training_step": lambda module, batch, batch_idx: None}},
            r"return a loss of zero",
        ),
        (
            {"module": {"training_step": logs_a_median}},
            r"self.log\('loss', reduce_fx='median'\) in training_step: expected 'mean', 'sum'",
        ),
        (
            {
                "module": {
                    "configure_model": adds_an_error,
                    "on_train_batch_end": updates_behind_the_step,
                }
            },
            "error, a torchmetrics module, was updated in on_train_batch_end.*update it in "
            "training_step",
        ),
        (
            {"loader": [DataLoader(DATA), DataLoader(DATA)]},
            "found 2 loaders, but only one is supported",
        ),
        (
            {"loader": DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))},
            "DistributedSampler deals samples to a fixed number of ranks",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises((ConfigurationError, RuntimeError), match=error):
        fit(tmp_path, **arguments)


def test_metrics_with_more_than_their_declared_states_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchmetrics import MeanSquaredError, MinMaxMetric

    def configure(module: Any) -> None:
        module.error = MinMaxMetric(MeanSquaredError())

    with pytest.raises(ConfigurationError, match=r"Net.error, a torchmetrics MinMaxMetric"):
        fit(tmp_path, module={"configure_model": configure})
    with pytest.raises(
        ConfigurationError, match=r"ModelCheckpoint.*use shoal.integrations.lightning.Checkpoints"
    ):
        fit(tmp_path, callbacks=[ModelCheckpoint(monitor="loss")])


def test_trainer_without_further_arguments_trains_and_saves_nothing(tmp_path: Path) -> None:
    trainer = fit(tmp_path)
    assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert [*tmp_path.iterdir()] == []


def test_different_model_checkpoint_path_and_second_fit_are_refused(tmp_path: Path) -> None:
    trainer = fit(tmp_path, module={"validation_step": lambda module, batch, batch_idx: None})
    trainer.validate(trainer.lightning_module, DataLoader(DATA), verbose=False)
    with pytest.raises(
        ConfigurationError, match=r"ckpt_path='some.ckpt': this process already has a model"
    ):
        trainer.validate(trainer.lightning_module, DataLoader(DATA), ckpt_path="some.ckpt")
    with pytest.raises(
        PreconditionError,
        match=r"Trainer.validate\(\) was called with a different Net than before",
    ):
        trainer.validate(type(trainer.lightning_module)(), DataLoader(DATA))
    with pytest.raises(PreconditionError, match=r"fit\(\) was called after another fit\(\)"):
        trainer.fit(trainer.lightning_module, DataLoader(DATA))


def test_a_value_that_differs_by_rank_is_an_error_on_all_of_them() -> None:
    alike = [["on_train_epoch_end", "mean", 1.0], ["on_train_epoch_end", "lowest", float("nan")]]
    from shoal.integrations.lightning.results import check_alike

    check_alike([alike, [list(each) for each in alike]])
    with pytest.raises(
        PreconditionError,
        match=r"self.log\('mean'\) in on_train_epoch_end: rank 0 logged 1.0, but rank 1 logged "
        r"'mean' with 2.0",
    ):
        check_alike([alike, [["on_train_epoch_end", "mean", 2.0], alike[1]]])
    with pytest.raises(PreconditionError, match="rank 0 logged 2 values, but rank 1 logged 1"):
        check_alike([alike, alike[:1]])
