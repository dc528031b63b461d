"""Helpers for tests that run one worker in their own process."""

from __future__ import annotations

from typing import Any

import shoal_worker.api as shoal
import torch
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.train import FEATURES, network


def distributed(net: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    net = net or network(0)
    return shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), strategy="async_sgd", **options
    )


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(4, FEATURES)).square().mean() * scale).backward()


def versions(running: AsyncCluster) -> set[int]:
    return {
        partition.version for server in running.servers for partition in server.look().partitions
    }
