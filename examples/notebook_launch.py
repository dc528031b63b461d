"""Trains on several ranks without a cluster, as in a notebook: the ranks are threads of this
process. Each "# %%" begins a cell."""

# %%
import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
)


# %%
def count_correct(model, batch):
    images, labels = batch
    return {"correct": (model(images).argmax(1) == labels).sum(), "samples": len(labels)}


def train(strategy):
    """Trains on one rank. All ranks use the same objects from outside this function, such as the
    dataset. Each rank creates its own model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(dataset, global_batch_size=256, seed=0)
    for _ in loader.epochs(5):
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = shoal.evaluate(
        model, shoal.ElasticDataLoader(dataset, global_batch_size=512, train=False), count_correct
    )
    return {
        "accuracy": found["correct"] / found["samples"],
        "elements held": sum(part.numel() for part in model.local_shard.values()),
        "parameters": model.gather_full_parameters(),
    }


# %%
results = {strategy: shoal.launch(train, strategy, world_size=4) for strategy in ("ddp", "zero3")}
for strategy, ranks in results.items():
    print(
        f"{strategy}: accuracy {ranks[0]['accuracy']:.3f}, elements held by each rank "
        f"{[rank['elements held'] for rank in ranks]}"
    )

# %%
# Both strategies compute the same parameters, but store them differently.
for name, expected in results["ddp"][0]["parameters"].items():
    torch.testing.assert_close(
        results["zero3"][0]["parameters"][name], expected, rtol=1e-3, atol=1e-4
    )
