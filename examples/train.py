"""The elastic version of train_plain.py: `shoal run --standalone --nproc-per-node 3 train.py`.
Seven lines differ."""

import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model, optimizer = shoal.as_distributed(model, optimizer)
loader = shoal.ElasticDataLoader(dataset, global_batch_size=96)

for epoch in loader.epochs(300):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        shoal.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    shoal.print_once(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
