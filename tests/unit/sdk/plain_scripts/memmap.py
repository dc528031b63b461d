"""Fit a next-token model to tokens in a memory-mapped file."""

import numpy as np
import torch
from torch import nn

BATCH, CONTEXT, VOCABULARY = 16, 24, 64
MAX_ITERS, WARMUP, LR = 60, 10, 3e-3

tokens = np.memmap("tokens.bin", dtype=np.uint16, mode="r")
rng = np.random.default_rng(0)


def sample():
    starts = rng.integers(0, len(tokens) - CONTEXT - 1, size=BATCH)
    windows = np.stack([tokens[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)
    windows = torch.from_numpy(windows)
    return windows[:, :-1], windows[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, inputs):
        return self.head(self.rnn(self.embed(inputs))[0])


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=LR)

for it in range(MAX_ITERS):
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (it + 1) / WARMUP)
    inputs, targets = sample()
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 10 == 0:
        print(f"{it}: {loss.item():.4f}")

torch.save(model.state_dict(), "model.pt")
