"""A plain PyTorch script that trains a small network on handwritten digits. train.py is the same
script with Shoal."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(dataset, batch_size=96, shuffle=True)

for epoch in range(300):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
