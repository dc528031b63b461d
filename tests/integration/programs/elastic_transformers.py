"""transformers' Trainer, elastic: a small GPT-2 with dropout, a schedule, and evaluations with
metrics. At the end it loads the best model, which is that of step 20 of 40. Each rank prints its
final state.

Arguments: a directory, a strategy, and optionally "kill", "late", "saving" or "slow". "kill": the
second worker kills itself in its 6th step, before the update. "late": it does so in its evaluation
after step 5. In both cases the others wait after step 10 for its replacement. "saving": it is
killed while it writes its part of the best checkpoint. "slow": each step takes 0.3 s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import shoal
import torch
from shoal.integrations.transformers import Trainer, TrainingArguments
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    set_seed,
)
from xxhash import xxh3_64_hexdigest


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 16 tokens, some of which are masked in the loss."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (index % 7 + 1) + index) % 50
        return {"input_ids": row, "labels": row.masked_fill(torch.arange(16) < index % 5, -100)}


class Fault(TrainerCallback):
    """Kills the second worker once and holds the others until it has been replaced; or slows the
    steps."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.mode, self.killed, self.came = mode, directory / "killed", directory / "came"
        self.second = os.environ.get("LOCAL_RANK") == "1"
        if self.second and self.killed.exists():
            self.came.touch()
        elif self.second and mode == "saving":
            self.killed.touch()
            # the fourth checkpoint is that of step 20
            os.environ["SHOAL_FAILPOINTS"] = "checkpoint.shard_written@4=kill"

    def kill(self) -> None:
        if self.second and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.mode == "kill" and state.global_step == 5:
            self.kill()

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.mode == "late" and state.global_step == 5:
            self.kill()

    def on_step_end(self, args, state, control, **kwargs):
        if self.mode == "slow":
            time.sleep(0.3)
        if self.mode in ("slow", "saving"):
            return
        give_up_at = time.monotonic() + 120
        while state.global_step >= 10 and not self.came.exists() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        if state.global_step >= 10 and shoal.world_size() < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.2)


def digest(state: dict[str, torch.Tensor]) -> str:
    return xxh3_64_hexdigest(
        b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(state.items()))
    )


def accuracy(predictions) -> dict[str, float]:
    received = predictions.predictions.argmax(-1)[:, :-1]
    labels = predictions.label_ids[:, 1:]
    counted = labels != -100
    return {
        "accuracy": float((received == labels)[counted].mean()),
        "rows": float(np.shape(labels)[0]),
    }


def main() -> None:
    directory, strategy, mode = (
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3] if len(sys.argv) > 3 else "",
    )
    directory.mkdir(exist_ok=True)
    fault = Fault(directory, mode)
    set_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="middle",
        greater_is_better=True,
        logging_steps=5,
        save_strategy="epoch",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )
    patience = EarlyStoppingCallback(early_stopping_patience=20)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Tokens(39),
        eval_dataset=Tokens(11),
        compute_metrics=lambda predictions: {
            **accuracy(predictions),
            "middle": -abs(trainer.state.global_step - 20),
        },
        strategy=strategy,
        strategy_options={"deterministic": True},
        callbacks=[patience, *([fault] if mode else [])],
    )
    loss = trainer.train(resume_from_checkpoint=True).training_loss
    state = trainer.model_wrapped.full_state_dict()
    speeds = ("_runtime", "_per_second")
    history = [
        {name: round(value, 6) for name, value in entry.items() if not name.endswith(speeds)}
        for entry in trainer.state.log_history
    ]
    trainer.save_model(str(directory / "model"))
    received = {
        "best": digest(state),
        "best_step": trainer.state.best_global_step,
        "loss": round(loss, 9),
        "steps": trainer.state.global_step,
        "world": shoal.world_size(),
        "history": history,
        "patience": patience.early_stopping_patience_counter,
    }
    print(f"told {json.dumps(received)}", flush=True)


if __name__ == "__main__":
    main()
