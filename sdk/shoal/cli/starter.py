"""Trains a small network to decide whether a point of a square lies in a ring. Replace
`make_datasets` and `make_model` with your own, and the loss in `main`.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the validation set."""
    points = torch.rand(5120, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    radius = points.norm(dim=1)
    inside = ((radius > 0.4) & (radius < 0.8)).long()
    return TensorDataset(points[:4096], inside[:4096]), TensorDataset(points[4096:], inside[4096:])


def make_model() -> nn.Module:
    """Returns a network that assigns points to two classes."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def count_correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    """Returns the number of correct answers and of samples in one batch. shoal.evaluate sums them
    over all batches and ranks."""
    inputs, labels = batch
    return {"correct": int((model(inputs).argmax(1) == labels).sum()), "all": len(labels)}


def main() -> None:
    """Trains, validates after each epoch, and keeps the newest and the best checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch-size", type=int, default=128, help="of all workers")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--strategy", default="ddp", help="ddp, zero2, fsdp, ...")
    parser.add_argument("--checkpoints", default="checkpoints", help="directory to resume from")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    training, validation = make_datasets()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), arguments.lr)
    model, optimizer = shoal.as_distributed(model, optimizer, strategy=arguments.strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.7)
    batch_size = arguments.global_batch_size
    loader = shoal.ElasticDataLoader(training, global_batch_size=batch_size)
    held_out = shoal.ElasticDataLoader(validation, global_batch_size=batch_size, train=False)

    # Your own values that the loop updates: joiners and resumed runs receive them.
    run = shoal.register_state(best=0.0)
    shoal.resume(arguments.checkpoints)  # the newest checkpoint, if there is one

    for epoch in loader.epochs(arguments.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            shoal.report(loss=loss)  # for shoal status, shoal top and the status page
            if optimizer.step():  # False if a worker died: the same samples come again
                scheduler.step()
            optimizer.zero_grad()
        # All workers evaluate, save and gather together: not within is_main_process().
        sums = shoal.evaluate(model, held_out, count_correct)
        accuracy = sums["correct"] / sums["all"]
        run.best = max(run.best, accuracy)
        shoal.save_checkpoint(arguments.checkpoints, best=accuracy, mode="max")
        shoal.print_once(f"epoch {epoch}: accuracy {accuracy:.4f}, best {run.best:.4f}", flush=True)

    state = model.full_state_dict()
    if shoal.is_main_process():  # one process writes the file
        torch.save(state, "model.pt")


if __name__ == "__main__":
    main()
