"""Unmodified models from Lightning's own tests and demos: a BoringModel through fit, validate, test
and predict, and its port of the word language model from torch's examples, with `prepare_data`.

Arguments: a directory, "boring" or "language", a strategy ("plain": Lightning's own, in one
process), and optionally "kill": the second worker kills itself in its 6th step. The language model
reads `data/wikitext-2.txt` in the working directory, and would download it if it were missing.
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
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from shoal.integrations.lightning import ShoalStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Killed(Callback):
    """Kills the second worker once."""

    def __init__(self, directory: Path) -> None:
        self.killed = directory / "killed"

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if (
            trainer.global_step == 5
            and os.environ.get("LOCAL_RANK") == "1"
            and not self.killed.exists()
        ):
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Language(LightningTransformer):
    """Records where it prepares data."""

    def prepare_data(self) -> None:
        print("prepares data", flush=True)
        super().prepare_data()


def main() -> None:
    directory, model, strategy, mode = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3],
        sys.argv[4] if len(sys.argv) > 4 else "",
    )
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = BoringModel() if model == "boring" else Language(WikiText2().vocab_size)
    # The steps of the language model amplify a rounding error a thousandfold, so it is compared bit
    # for bit.
    named: dict[str, Any] = (
        {"strategy": ShoalStrategy(strategy, deterministic=model == "language")}
        if strategy != "plain"
        else {}
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=4 if model == "language" else 1,
        callbacks=[Killed(directory)] if mode == "kill" else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **named,
    )
    trainer.fit(net)
    received: dict[str, Any] = {"steps": trainer.global_step}
    if model == "boring":
        received["validated"], received["tested"] = (
            trainer.validate(net, verbose=False),
            trainer.test(net, verbose=False),
        )
        predictions = trainer.predict(net)
        assert predictions is not None
        received["predicted"] = [
            float(one.sum()) for one in predictions if isinstance(one, torch.Tensor)
        ]
    trainer.save_checkpoint(directory / "model.ckpt", weights_only=True)
    print(f"told {json.dumps(received)}", flush=True)


if __name__ == "__main__":
    main()
