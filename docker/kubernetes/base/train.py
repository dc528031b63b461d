"""A stand-in for your script: it saves, resumes, and ends after a few epochs."""

import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(960, 8)
targets = inputs.sum(dim=1, keepdim=True)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
model, optimizer = shoal.as_distributed(net, torch.optim.AdamW(net.parameters(), 1e-2))
loader = shoal.ElasticDataLoader(TensorDataset(inputs, targets), global_batch_size=96)
shoal.resume("/checkpoints")

for epoch in loader.epochs(20):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shoal.save_checkpoint("/checkpoints")
    print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
