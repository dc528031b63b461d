"""Train a small GPT on characters, in the shape of nanoGPT's train.py."""

import math
import pickle
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import shoal
import torch
from torch import nn
from torch.nn import functional as F

# I/O
out_dir = Path("out")
eval_interval = 20
log_interval = 5
eval_iters = 4
eval_only = False
always_save_checkpoint = False
init_from = "scratch"  # or "resume"
# data
dataset = "shakespeare_char"
gradient_accumulation_steps = 4
batch_size = 8
block_size = 32
# model
n_layer, n_head, n_embd = 2, 2, 32
dropout = 0.0
# adamw
learning_rate = 1e-3
max_iters = 40
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
# decay
decay_lr = True
warmup_iters = 10
lr_decay_iters = 40
min_lr = 1e-4
# system
device = shoal.device()
dtype = "float32"

tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
shoal.print_once(f"tokens per iteration will be: {tokens_per_iter:,}")
out_dir.mkdir(exist_ok=True)
torch.manual_seed(1337)
ctx = nullcontext() if device.type == "cpu" else torch.amp.autocast(device_type=device.type)

data_dir = Path("data") / dataset


class Windows(torch.utils.data.Dataset):
    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return len(self.tokens) - self.length

    def __getitem__(self, start):
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        return window[:-1], window[1:]


def windows(split):
    return Windows(np.memmap(data_dir / f"{split}.bin", np.uint16, "r"), block_size)


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        t = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        logits = self.lm_head(self.blocks(x, mask, is_causal=True))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


with (data_dir / "meta.pkl").open("rb") as f:
    vocab_size = pickle.load(f)["vocab_size"]
model = GPT(vocab_size)
model.to(device)
scaler = torch.amp.GradScaler(device.type, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
model, optimizer = shoal.as_distributed(model, optimizer)
loader = shoal.ElasticDataLoader(
    windows("train"),
    global_batch_size=batch_size * gradient_accumulation_steps,
    micro_batch_size=batch_size,
)
held_out = {
    split: shoal.ElasticDataLoader(
        torch.utils.data.Subset(windows(split), range(eval_iters * batch_size)),
        global_batch_size=batch_size,
        train=False,
    )
    for split in ("train", "val")
}
run = shoal.register_state(best_val_loss=1e9)


def losses_of(model, batch):
    X, Y = batch
    return {"loss": model(X, Y)[1].item() * len(X), "n": len(X)}


def estimate_loss():
    out = {}
    for split, each in held_out.items():
        sums = shoal.evaluate(model, each, losses_of)
        out[split] = sums["loss"] / sums["n"]
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


shoal.resume(out_dir)
t0 = time.time()
for _epoch in loader.epochs(max_steps=max_iters):
    for step in loader.steps():
        lr = get_lr(loader.global_step) if decay_lr else learning_rate
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for X, Y in step:
            with ctx:
                logits, loss = model(X, Y)
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if loader.global_step % log_interval == 0:
            shoal.print_once(f"iter {loader.global_step}: loss {loss.item():.4f}, lr {lr:.6f}")
        if loader.global_step % eval_interval == 0:
            losses = estimate_loss()
            shoal.print_once(f"step {loader.global_step}: val loss {losses['val']:.4f}")
            if losses["val"] < run.best_val_loss:
                run.best_val_loss = losses["val"]
            shoal.save_checkpoint(out_dir)
