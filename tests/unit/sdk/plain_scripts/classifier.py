"""Train an image classifier with a moving average of its weights and gradient accumulation."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum-steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def make_data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(600, 1, 8, 8, generator=generator)
    labels = (images.mean((1, 2, 3)) > 0).long()
    return TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:], labels[512:])


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(1) == labels).sum().item()
        total += labels.numel()
    model.train()
    return correct / total


def main():
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, val_set = make_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=64)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2)
    ).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        running = 0.0
        optimizer.zero_grad()
        for i, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels) / args.accum_steps
            loss.backward()
            running += loss.item() * args.accum_steps
            if (i + 1) % args.accum_steps == 0 or i + 1 == len(train_loader):
                optimizer.step()
                ema.update_parameters(model)
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {running / len(train_loader):.4f}")
        print(f"accuracy {accuracy(ema, val_loader, device):.3f}")
    torch.save(ema.module.state_dict(), "ema.pt")


if __name__ == "__main__":
    main()
