"""Lightning's Trainer with common logging and metrics: torchmetrics' modules, values per step and
per epoch with every reduction, validations within epochs, then `validate`, `test` and `predict`.
Each rank prints the results.

Arguments: a directory, a strategy ("plain": Lightning's own, in one process), and optionally when
the second worker kills itself: "kill" is in the fit, after the forward pass of its 5th step; "late"
is in the test, at its second batch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import shoal
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from shoal.integrations.lightning import ShoalStrategy
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
CLASSES = 4


class Net(lightning.LightningModule):
    """A classifier that logs in every supported way."""

    def __init__(self, directory: Path, mode: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.scores = MetricCollection(
            [MulticlassF1Score(CLASSES), MulticlassAUROC(CLASSES)], prefix="score/"
        )
        self.pearson = PearsonCorrCoef()
        self.mean = MeanMetric()
        self.killed, self.mode, self.steps, self.tests = directory / "killed", mode, 0, 0

    def forward(self, x):
        return self.layers(x)

    def kill_at(self, mode: str) -> None:
        if self.mode == mode and os.environ.get("LOCAL_RANK") == "1" and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch, batch_idx):
        x, y = batch
        said = self(x)
        loss = nn.functional.cross_entropy(said, y)
        self.accuracy(said, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("samples", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("highest", said.max(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.mean.update(said.mean(), weight=len(x))
        if self.trainer.global_step == 4:
            self.kill_at("kill")
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def evaluate(self, batch, kind: str) -> None:
        x, y = batch
        said = self(x)
        self.scores.update(said.softmax(-1), y)
        if kind == "val":
            self.pearson.update(said[:, 0], y.float())
        self.log(f"{kind}_loss", nn.functional.cross_entropy(said, y), sync_dist=True)
        self.log(f"{kind}_samples", float(len(x)), reduce_fx="sum")

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.tests += 1
        if self.tests == 2:
            self.kill_at("late")
        self.evaluate(batch, "test")

    def on_validation_epoch_end(self):
        self.on_test_epoch_end()
        self.log("pearson", self.pearson)

    def on_test_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()

    def predict_step(self, batch, batch_idx):
        return self(batch[0]), {"labels": batch[1], "batch": batch_idx}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        }


class Writer(BasePredictionWriter):
    """Writes each batch's samples, and the total number of predictions."""

    def __init__(self, directory: Path) -> None:
        super().__init__("batch_and_epoch")
        self.directory = directory

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ):
        (self.directory / f"batch-{batch_idx}.json").write_text(json.dumps(batch_indices))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        (self.directory / "all.json").write_text(json.dumps([len(predictions), batch_indices]))


def main() -> None:
    directory, strategy, mode = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3] if len(sys.argv) > 3 else "",
    )
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(50, 8), torch.randint(0, CLASSES, (50,)))
    named: dict[str, Any] = {"strategy": ShoalStrategy(strategy)} if strategy != "plain" else {}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        val_check_interval=4,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(), Writer(directory)],
        logger=CSVLogger(directory, name="csv", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **named,
    )
    net = Net(directory, mode)

    def loader(size: int) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=size)

    trainer.fit(net, loader(6), loader(7))
    fitted = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    validated = trainer.validate(net, loader(8), verbose=False)
    tested = trainer.test(net, [loader(9), loader(20)], verbose=False)
    predictions = trainer.predict(net, loader(11))
    assert predictions is not None
    predicted = [
        [float(said.sum()), received["labels"].tolist(), received["batch"]]
        for said, received in predictions
    ]
    received = {"fitted": fitted, "validated": validated, "tested": tested, "predicted": predicted}
    received["world"] = shoal.world_size() if strategy != "plain" else 1
    print(f"told {json.dumps(received)}", flush=True)


if __name__ == "__main__":
    main()
