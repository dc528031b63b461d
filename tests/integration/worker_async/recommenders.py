"""A small model with two sparse tables, its twin with torch's embeddings, and training loops for
both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import shoal_worker.api as shoal
import torch
from shoal_worker.sparse_tables.embedding import SparseEmbedding, SparseEmbeddingBag
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster

DIM = 8
IDS = 200


class Recommender(nn.Module):
    """A model with two sparse tables and a dense part."""

    def __init__(self, users: nn.Module, words: nn.Module) -> None:
        super().__init__()
        self.users = users
        self.words = words
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.users(users), self.words(words)], dim=1)).squeeze(1)


def sparse(num_embeddings: int | None = IDS, **options: Any) -> Recommender:
    torch.manual_seed(0)
    users = SparseEmbedding(
        num_embeddings,
        DIM,
        name="users",
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
        scale=0.5,
        **options,
    )
    words = SparseEmbeddingBag(
        num_embeddings,
        DIM,
        name="words",
        mode="sum",
        optimizer=partial(torch.optim.SparseAdam, lr=0.01),
        seed=1,
        buckets=3,
    )
    return Recommender(users, words)


def dense_twin(model: Recommender) -> tuple[Recommender, list[torch.optim.Optimizer]]:
    """Returns the same model with torch's embeddings, and a torch optimizer for each part."""
    ids = torch.arange(IDS)
    with torch.no_grad():
        users = nn.Embedding(IDS, DIM, sparse=True, _weight=model.users(ids))
        words = nn.EmbeddingBag(
            IDS, DIM, mode="sum", sparse=True, _weight=model.words(ids.unsqueeze(1))
        )
    twin = Recommender(users, words)
    twin.out = copy.deepcopy(model.out)
    optimizers = [
        torch.optim.Adagrad(users.parameters(), 0.1),
        torch.optim.SparseAdam(list(words.parameters()), 0.01),
        torch.optim.SGD(twin.out.parameters(), 0.1),
    ]
    return twin, optimizers


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        users, words = (
            torch.randint(0, IDS, (16,), generator=generator),
            torch.randint(0, IDS, (16, 3), generator=generator),
        )
        yield users, words, ((users + words.sum(1)) % 2).float()


def distributed(net: nn.Module, **options: Any) -> tuple[Any, Any]:
    return shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd", **options
    )


def train(model: Any, optimizers: list[Any], count: int = 8) -> None:
    for users, words, labels in batches(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(users, words), labels).backward()
        for optimizer in optimizers:
            optimizer.step()


def begin_step(model: Any) -> None:
    """Runs a forward pass whose result is not used."""
    model(torch.tensor([0]), torch.tensor([[0]]))


def rows_of(net: Recommender) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return net.users(torch.arange(IDS)), net.words(torch.arange(IDS).unsqueeze(1))


def versions(running: AsyncCluster) -> set[int]:
    return {
        partition.version for server in running.servers for partition in server.look().partitions
    }
