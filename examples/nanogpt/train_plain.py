"""Trains a small GPT. train_plain.py is a script like nanoGPT's, train.py the same with Shoal."""

import math
import os

import numpy as np
import torch
from model import GPT, GPTConfig

max_iters, eval_interval, eval_iters, log_interval = 500, 100, 10, 20
batch_size, gradient_accumulation_steps, block_size = 4, 4, 32
learning_rate, min_lr, warmup_iters, grad_clip = 1e-3, 1e-4, 50, 1.0
dtype = os.environ.get("DTYPE", "float32")  # or bfloat16
init_from = os.environ.get("INIT_FROM", "scratch")  # or resume

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
autocast = torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = [torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in starts]
    windows = torch.stack(rows).to(device)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        x, y = get_batch("val")
        with autocast:
            _, loss = model(x, y)
        losses[k] = loss
    model.train()
    return losses.mean().item()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(GPTConfig(block_size=block_size)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
iter_num, best_val_loss = 0, math.inf
if init_from == "resume":
    checkpoint = torch.load("ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]

while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(gradient_accumulation_steps):
        x, y = get_batch("train")
        with autocast:
            _, loss = model(x, y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        print(f"iter {iter_num}: val loss {val_loss:.4f}")
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "iter_num": iter_num, "best_val_loss": val_loss}, "ckpt.pt")
