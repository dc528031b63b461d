"""Fit a next-token model to tokens in a memory-mapped file."""

import numpy as np
import shoal
import torch
from torch import nn

BATCH, CONTEXT, VOCABULARY = 16, 24, 64
MAX_ITERS, WARMUP, LR = 60, 10, 3e-3

tokens = np.memmap("tokens.bin", dtype=np.uint16, mode="r")


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens) - CONTEXT

    def __getitem__(self, start):
        window = tokens[start : start + CONTEXT + 1].astype(np.int64)
        return window[:-1], window[1:]


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

model, optimizer = shoal.as_distributed(model, optimizer)
loader = shoal.ElasticDataLoader(Windows(), global_batch_size=BATCH)

for _epoch in loader.epochs(max_steps=MAX_ITERS):
    for inputs, targets in loader:
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (loader.global_step + 1) / WARMUP)
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if optimizer.step() and loader.global_step % 10 == 0:
            shoal.print_once(f"{loader.global_step}: {loss.item():.4f}")

state = model.full_state_dict()
if shoal.is_main_process():
    torch.save(state, "model.pt")
