"""Trains an image classifier. train_plain.py is an ordinary script, train.py the same with
Shoal."""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--resume", help="checkpoint to continue from, such as last.pt")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
batch_size, peak_lr, warmup = 96, 0.1, 50


@torch.no_grad()
def validate(net):
    net.eval()
    right = 0
    for images, labels in held_out:
        images, labels = images.to(device), labels.to(device)
        right += (net(images).argmax(1) == labels).sum().item()
    net.train()
    return right / len(held_out.dataset)


def lr_factor(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1440], labels[:1440])
validation = TensorDataset(images[1440:], labels[1440:])
loader = DataLoader(training, batch_size, shuffle=True)
held_out = DataLoader(validation, batch_size)
steps = args.epochs * len(loader)

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 10)),
).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
first_epoch, best = 0, 0.0
if args.resume:
    state = torch.load(args.resume, map_location=device)
    model.load_state_dict(state["model"])
    average.load_state_dict(state["average"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first_epoch, best = state["epoch"] + 1, state["best"]

for epoch in range(first_epoch, args.epochs):
    total = 0.0
    for images, labels in tqdm(loader, desc=f"epoch {epoch}"):
        images, labels = images.to(device), labels.to(device)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        total += loss.item()
        optimizer.zero_grad()
    accuracy = validate(average)
    print(f"epoch {epoch}: mean loss {total / len(loader):.4f}, accuracy {accuracy:.4f}")
    state = {"model": model.state_dict(), "average": average.state_dict(), "epoch": epoch}
    state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state["best"] = max(best, accuracy)
    torch.save(state, "last.pt")
    if accuracy > best:
        best = accuracy
        torch.save(state, "best.pt")

average.load_state_dict(torch.load("best.pt", map_location=device)["average"])
print(f"best model: accuracy {validate(average):.4f}")
torch.save(average.module.state_dict(), "model.pt")
