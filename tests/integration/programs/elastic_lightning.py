"""Lightning's Trainer, elastic: a small network with dropout, a schedule, clipping, validations and
early stopping, in epochs of a limited number of batches. Each rank prints its final state.

Arguments: a directory, a strategy ("plain": Lightning's own, in one process), and optionally
"kill", "late" or "slow". "kill": the second worker kills itself in its 6th step, before the update.
"late": it does so in the validation after step 5. In both cases the others wait after step 10 for
its replacement. "slow": each step takes 0.3 s.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import shoal
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from shoal.integrations.lightning import Checkpoints, ShoalStrategy
from torch import nn
from xxhash import xxh3_64_hexdigest

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    """A regression network. `dropout` is off in comparisons with Lightning's own strategy, which
    draws different random numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self(x)
        loss = nn.functional.mse_loss(prediction, y)
        self.log("loss", loss, on_epoch=True)
        self.log("error", (prediction - y).abs().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fault(Callback):
    """Kills the second worker once and holds the others until it has been replaced; or slows the
    steps."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.mode, self.killed, self.came = mode, directory / "killed", directory / "came"
        self.second = os.environ.get("LOCAL_RANK") == "1"
        if self.second and self.killed.exists():
            self.came.touch()

    def kill(self) -> None:
        if self.second and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.mode == "kill" and trainer.global_step == 5:
            self.kill()

    def on_validation_batch_end(self, trainer, *rest):
        if self.mode == "late" and trainer.global_step == 5:
            self.kill()

    def on_train_batch_end(self, trainer, *rest):
        if self.mode == "slow":
            time.sleep(0.3)
            if trainer.global_step == 12 and trainer.is_global_zero:
                print("step 12 is over", flush=True)
            return
        give_up_at = time.monotonic() + 120
        while (
            trainer.global_step >= 10 and not self.came.exists() and time.monotonic() < give_up_at
        ):
            time.sleep(0.05)
        if trainer.global_step >= 10 and shoal.world_size() < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.2)


class Course(Callback):
    """The results of each epoch, in registered state that joiners receive."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        received = ("loss_epoch", "error", "val_loss")
        self.epochs.append(
            {
                name: round(float(trainer.callback_metrics[name]), 5)
                for name in received
                if name in trainer.callback_metrics
            }
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = list(state["epochs"])


def main() -> None:
    directory, strategy, mode = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3] if len(sys.argv) > 3 else "",
    )
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(48, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    course, patience = Course(), EarlyStopping("val_loss", patience=50)
    callbacks: list[Callback] = [course, patience]
    named: dict[str, Any] = {"enable_checkpointing": False}
    if strategy not in ("plain", "alike"):
        callbacks.append(
            Checkpoints(directory / "checkpoints", every_n_steps=7, keep=2, resume=True)
        )
        named = {}
    if strategy != "plain":
        named["strategy"] = ShoalStrategy(
            "ddp" if strategy == "alike" else strategy, deterministic=True
        )
    if mode:
        callbacks.append(Fault(directory, mode))
    net = Net(0.0 if strategy in ("plain", "alike") else 0.2)
    trainer = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        accumulate_grad_batches=4,
        limit_train_batches=20,
        limit_val_batches=0.9,
        gradient_clip_val=0.5,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **named,
    )
    train = torch.utils.data.DataLoader(
        data, batch_size=2, shuffle=strategy not in ("plain", "alike")
    )
    trainer.fit(net, train, torch.utils.data.DataLoader(data, batch_size=6))
    state = trainer.strategy.lightning_module_state_dict()
    trainer.save_checkpoint(directory / "model.ckpt", weights_only=True)
    received = {
        "digest": xxh3_64_hexdigest(
            b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(state.items()))
        ),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "world": shoal.world_size() if strategy != "plain" else 1,
        "course": course.epochs,
        "patience": patience.wait_count,
    }
    print(f"told {json.dumps(received)}", flush=True)


if __name__ == "__main__":
    main()
