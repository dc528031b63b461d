"""Trains an image classifier. train_plain.py is an ordinary script, train.py the same with
Shoal."""

import argparse
import math

import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
args = parser.parse_args()

torch.manual_seed(0)
device = shoal.device()
batch_size, peak_lr, warmup = 96, 0.1, 50


def count_right(net, batch):
    images, labels = (part.to(device) for part in batch)
    return {"right": (net(images).argmax(1) == labels).sum(), "all": len(labels)}


def lr_factor(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1440], labels[:1440])
validation = TensorDataset(images[1440:], labels[1440:])
loader = shoal.ElasticDataLoader(training, global_batch_size=batch_size)
held_out = shoal.ElasticDataLoader(validation, global_batch_size=batch_size, train=False)
steps = args.epochs * len(loader)

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 10)),
).to(device)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, weight_decay=5e-4)
model, optimizer = shoal.as_distributed(model, optimizer)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
run = shoal.register_state(total=0.0)
shoal.resume("checkpoints")

for epoch in loader.epochs(args.epochs):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = model.train_step(images, labels, nn.functional.cross_entropy)
        if optimizer.step():
            scheduler.step()
            average.update_parameters(model)
            run.total += loss.item()
        optimizer.zero_grad()
    sums = shoal.evaluate(average, held_out, count_right)
    accuracy = sums["right"] / sums["all"]
    if loader.global_step == (epoch + 1) * len(loader):
        mean_loss = run.total / len(loader)
        shoal.print_once(f"epoch {epoch}: mean loss {mean_loss:.4f}, accuracy {accuracy:.4f}")
        run.total = 0.0
    shoal.save_checkpoint("checkpoints", best=accuracy, mode="max")

if loader.global_step == steps:
    shoal.shutdown()
    state = shoal.load_full_state("checkpoints", best=True, average=0)
    model.module.load_state_dict(state)
    sums = shoal.evaluate(model.module, held_out, count_right)
    shoal.print_once(f"best model: accuracy {sums['right'] / sums['all']:.4f}")
    if shoal.is_main_process():
        torch.save(state, "model.pt")
