"""transformers' Trainer as its users write it: a small GPT-2 on tokens that follow from their
positions. Prints a line at its end."""

from __future__ import annotations

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of 16 tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (index % 7 + 1) + index) % 50
        return {"input_ids": row, "labels": row}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
    )
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    loss = trainer.train().training_loss
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"ranks {arguments.world_size} loss {loss:.6f} sum {total:.9f}", flush=True)
    # Skips destructors. A thread of torch's process group that still owns a collective's tensors
    # needs the interpreter to release them, while the interpreter waits for that thread. If the
    # group is not destroyed, the process may abort instead.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
