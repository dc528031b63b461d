"""Train an image classifier with a moving average of its weights and gradient accumulation."""

import argparse

import shoal
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset


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


def correct(model, batch):
    images, labels = batch
    return {"right": (model(images).argmax(1) == labels).sum(), "all": len(labels)}


def main():
    args = parse_args()
    torch.manual_seed(0)
    train_set, val_set = make_data()

    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = shoal.as_distributed(model, optimizer)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    criterion = nn.CrossEntropyLoss()
    train_loader = shoal.ElasticDataLoader(
        train_set,
        global_batch_size=args.batch_size * args.accum_steps,
        micro_batch_size=args.batch_size,
    )
    val_loader = shoal.ElasticDataLoader(val_set, global_batch_size=64, train=False)

    for epoch in train_loader.epochs(args.epochs):
        for step in train_loader.steps():
            for images, labels in step:
                loss = criterion(model(images), labels)
                loss.backward()
                shoal.report(loss=loss)
            if optimizer.step():
                ema.update_parameters(model)
            optimizer.zero_grad()
        sums = shoal.evaluate(ema, val_loader, correct)
        shoal.print_once(f"epoch {epoch}: accuracy {sums['right'] / sums['all']:.3f}")
    state = ema.module.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    if shoal.is_main_process():
        torch.save(state, "ema.pt")


if __name__ == "__main__":
    main()
