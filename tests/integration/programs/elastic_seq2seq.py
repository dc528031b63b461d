"""transformers' Seq2SeqTrainer, elastic: a small T5 whose evaluations generate by beam search. Each
rank prints its final state.

Arguments: a directory, a strategy, and optionally "kill": the second worker kills itself in the
evaluation after step 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from shoal.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers import T5Config, T5ForConditionalGeneration, TrainerCallback, set_seed


class Reversed(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 8 tokens, with the same tokens in reverse order as labels."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(8) * (index % 7 + 1) + index) % 28 + 2
        return {"input_ids": row, "labels": row.flip(0)}


class Fault(TrainerCallback):
    """Kills the second worker once, in an evaluation."""

    def __init__(self, directory: Path) -> None:
        self.killed = directory / "killed"

    def on_prediction_step(self, args, state, control, **kwargs):
        second = os.environ.get("LOCAL_RANK") == "1"
        if second and state.global_step == 2 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, strategy, mode = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
    directory.mkdir(exist_ok=True)
    set_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    model = T5ForConditionalGeneration(
        T5Config(**sizes, num_heads=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )
    generated: list[list[list[int]]] = []

    def compare(received) -> dict[str, float]:
        generated.append(np.asarray(received.predictions).tolist())
        right = received.predictions[:, 1:9] == received.label_ids[:, :8]
        return {"right": float(right.mean())}

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            output_dir=str(directory),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            per_device_eval_batch_size=2,
            learning_rate=1e-1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=10,
            generation_num_beams=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Reversed(32),
        eval_dataset=Reversed(9),
        compute_metrics=compare,
        strategy=strategy,
        strategy_options={"deterministic": True},
        callbacks=[Fault(directory)] if mode == "kill" else [],
    )
    trainer.train()
    predicted = trainer.predict(Reversed(5), max_length=6, num_beams=1)
    received = {
        "generated": generated,
        "predicted": predicted.predictions.tolist(),
        "right": [one["eval_right"] for one in trainer.state.log_history if "eval_right" in one],
    }
    print(f"told {json.dumps(received)}", flush=True)


if __name__ == "__main__":
    main()
