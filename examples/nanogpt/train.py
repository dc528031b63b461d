"""Trains a small GPT. train_plain.py is a script like nanoGPT's, train.py the same with Shoal."""

import math
import os

import numpy as np
import shoal
import torch
from model import GPT, GPTConfig

max_iters, eval_interval, eval_iters, log_interval = 500, 100, 10, 20
batch_size, gradient_accumulation_steps, block_size = 4, 4, 32
learning_rate, min_lr, warmup_iters, grad_clip = 1e-3, 1e-4, 50, 1.0
dtype = os.environ.get("DTYPE", "float32")  # or bfloat16

torch.manual_seed(1337)
device = shoal.device()
autocast = torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


class Windows(torch.utils.data.Dataset):
    def __init__(self, split):
        self.data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.data) - 1) // block_size

    def __getitem__(self, i):
        i *= block_size
        row = torch.from_numpy(self.data[i : i + block_size + 1].astype(np.int64))
        return row[:-1], row[1:]


def sum_loss(model, batch):
    x, y = (part.to(device) for part in batch)
    with autocast:
        _, loss = model(x, y)
    return {"loss": loss * len(x), "windows": len(x)}


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(GPTConfig(block_size=block_size)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
model, optimizer = shoal.as_distributed(model, optimizer, deterministic=True)
loader = shoal.ElasticDataLoader(
    Windows("train"),
    global_batch_size=batch_size * gradient_accumulation_steps,
    micro_batch_size=batch_size,
    drop_last=True,
)
held_out = torch.utils.data.Subset(Windows("val"), range(eval_iters * batch_size))
held_out = shoal.ElasticDataLoader(held_out, global_batch_size=batch_size, train=False)
shoal.resume("checkpoints")
loss = torch.tensor(math.nan)

for _ in loader.epochs(max_steps=max_iters):
    for step in loader.steps():
        for group in optimizer.param_groups:
            group["lr"] = get_lr(loader.global_step)
        for x, y in step:
            with autocast:
                _, loss = model(x.to(device), y.to(device))
            loss.backward()
            shoal.report(loss=loss)
        model.clip_grad_norm_(grad_clip)
        if optimizer.step() and loader.global_step % log_interval == 0:
            shoal.print_once(f"iter {loader.global_step}: loss {loss.item():.4f}")
        optimizer.zero_grad()
        totals = shoal.evaluate(model, held_out, sum_loss, every_steps=eval_interval)
        if totals is not None:
            val_loss = totals["loss"] / totals["windows"]
            shoal.print_once(f"iter {loader.global_step}: val loss {val_loss:.4f}")
            shoal.save_checkpoint("checkpoints", best=val_loss, mode="min")
