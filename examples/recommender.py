"""Trains a recommender on a click log: a small DLRM (Naumov et al., "Deep Learning Recommendation
Model for Personalization and Recommendation Systems", 2019). Its embeddings are sparse tables on
parameter servers; its dense part is trained by ddp.

    shoal up --workers 2 --servers 2 examples/recommender.py

With --strategy async_sgd, workers do not wait for each other: the dense part is on the servers too,
and each worker pushes independently.

The log is generated, so that the best possible result is known. A user with id `u` is shown an item
with id `i` and three tags, and clicks on it with the probability

    sigmoid(factors(u) . factors(i) + appeal(i) + mean of appeal(tags) + dense . WEIGHTS - 0.5)

where factors (two numbers with mean 0) and appeal (one number) depend only on the id. After each
epoch, rank 0 prints the area under the ROC curve (AUC) on held-out clicks, and the AUC of the
probabilities themselves, which is the best possible result.
"""

import argparse
import resource
from functools import partial

import numpy as np
import shoal
import torch
from torch import nn

DIM = 8
TAGS = 3
MOST_TAGS = 100
WEIGHTS = np.array([0.8, -0.5, 0.3])


def factors(ids: np.ndarray, count: int, kind: int) -> np.ndarray:
    """Returns `count` numbers for each id, computed from the id, with mean 0 and variance 1. They
    are practically independent."""
    turns = np.random.default_rng(kind).random(count)
    return np.sqrt(2) * np.cos(2 * np.pi * (ids[..., None] * turns % 1.0))


def click_log(
    samples: int, users: int, items: int, seed: int
) -> tuple[list[torch.Tensor], np.ndarray]:
    """Returns the columns of the log (user, item, tags, three dense features, and whether the user
    clicked), and the probability of each click."""
    drawn = np.random.default_rng(seed)
    # some users and items occur more often than others
    who = (users * drawn.random(samples) ** 2).astype(np.int64)
    what = (items * drawn.random(samples) ** 2).astype(np.int64)
    tags = (what[:, None] * np.arange(1, TAGS + 1) * 7919) % MOST_TAGS
    dense = drawn.standard_normal((samples, len(WEIGHTS)))
    logits = (factors(who, 2, 1) * factors(what, 2, 2)).sum(1) + factors(what, 1, 3)[:, 0]
    logits += factors(tags, 1, 4)[..., 0].mean(1) + dense @ WEIGHTS - 0.5
    probability = 1 / (1 + np.exp(-logits))
    clicked = drawn.random(samples) < probability
    columns = [
        torch.from_numpy(column)
        for column in (who, what, tags, dense.astype(np.float32), clicked.astype(np.float32))
    ]
    return columns, probability


def area_under_curve(scores: np.ndarray, clicked: np.ndarray) -> float:
    """Returns the probability that a random sample with a click has a higher score than a random
    one without."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = clicked.sum()
    return float(
        (ranks[clicked].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(scores) - clicks))
    )


class Recommender(nn.Module):
    """Embeddings, a network for the dense features, the pairwise dot products of all these vectors,
    and a network that computes the result from them."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        table = {"optimizer": partial(torch.optim.Adagrad, lr=0.1), "scale": 0.1}
        self.users = shoal.SparseEmbedding(users, DIM, name="users", seed=1, **table)
        self.items = shoal.SparseEmbedding(items, DIM, name="items", seed=2, **table)
        self.tags = shoal.SparseEmbeddingBag(
            MOST_TAGS, DIM, name="tags", seed=3, mode="mean", **table
        )
        self.bottom = nn.Sequential(nn.Linear(len(WEIGHTS), 16), nn.ReLU(), nn.Linear(16, DIM))
        self.top = nn.Sequential(nn.Linear(DIM * 4 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(
        self, users: torch.Tensor, items: torch.Tensor, tags: torch.Tensor, dense: torch.Tensor
    ) -> torch.Tensor:
        vectors = torch.stack(
            [self.bottom(dense), self.users(users), self.items(items), self.tags(tags)], dim=1
        )
        first, second = torch.triu_indices(4, 4, offset=1)
        products = (vectors[:, first] * vectors[:, second]).sum(2)
        return self.top(torch.cat([vectors.flatten(1), products], dim=1)).squeeze(1)

    def prefetch(self, users: torch.Tensor, items: torch.Tensor, tags: torch.Tensor) -> None:
        self.users.prefetch(users)
        self.items.prefetch(items)
        self.tags.prefetch(tags)


def train(options: argparse.Namespace) -> None:
    shoal.init()
    torch.manual_seed(0)
    net = Recommender(options.users, options.items)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(net.parameters(), 5e-3), strategy=options.strategy
    )
    log, _ = click_log(options.samples, options.users, options.items, seed=1)
    (*shown, clicked), probability = click_log(20_000, options.users, options.items, seed=2)
    held_out = clicked.numpy() > 0
    asynchronous = options.strategy == "async_sgd"
    batches = (
        {"batch_size": options.batch_size, "look_ahead": True}
        if asynchronous
        else {"global_batch_size": options.batch_size}
    )
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(*log), **batches)

    def show(when: str) -> None:
        if shoal.is_main_process():
            reached = area_under_curve(model.predict(tuple(shown)).numpy(), held_out)
            best = area_under_curve(probability, held_out)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(
                f"{when}: AUC {reached:.4f} of {best:.4f}; this worker's memory {peak} MiB at most",
                flush=True,
            )

    if options.checkpoints is not None and shoal.resume(options.checkpoints):
        # restores the rows too: the servers may have none, or newer ones
        show("resumed")
    for epoch in loader.epochs(options.epochs):
        for *inputs, clicks in loader:
            if asynchronous and (upcoming := loader.peek()) is not None:
                # under ddp, the next rows are available only after this step's push
                net.prefetch(*upcoming[:3])
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), clicks)
            loss.backward()
            shoal.report(loss=loss)
            optimizer.step()
        show(f"epoch {epoch}")
        if options.checkpoints is not None:
            shoal.save_checkpoint(options.checkpoints)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=["ddp", "async_sgd"], default="ddp")
    parser.add_argument("--users", type=int, default=500, help="number of user ids")
    parser.add_argument("--items", type=int, default=300, help="number of item ids")
    parser.add_argument(
        "--samples",
        type=int,
        default=100_000,
        help="size of the log; each epoch trains on all of it",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=250,
        help="samples per step; with async_sgd, per step of one worker",
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--checkpoints",
        help="directory of checkpoints, one per epoch; resumes from the newest",
    )
    train(parser.parse_args())
