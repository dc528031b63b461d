"""Variations of the training loop beyond a forward pass, a backward pass and a step. Each runs with
every strategy.

A variation describes how model, optimizer and loop differ. The ranks and the single process that
they are compared with are created from the same variation (training.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.models import SAMPLES, Bag, Gpt, Mlp

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


OPTIMIZERS: Final[dict[str, Optimizers]] = {"sgd": sgd, "adamw": adamw}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One way to train. The defaults are the plain one."""

    says: str = ""
    """Description in the table."""
    model: str = "mlp"
    optimizer: Optimizers = sgd
    prepare: Callable[[nn.Module], nn.Module] = field(default=lambda net: net)
    """Changes the model before the optimizer is created. Returns the model to train."""
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    scaler: bool = False
    """True if losses are scaled by a torch.amp.GradScaler."""
    autocast: bool = False
    """True if forward passes compute in bfloat16."""
    train_step: bool = False
    """True if the loop calls `model.train_step` instead of forward, loss and backward."""
    sums: bool = False
    """True if losses are sums instead of means."""
    by_hand: bool = False
    """True if the loop calls `model.synchronize_gradients()`."""
    micro: bool = False
    """True if the loop uses micro-batches, for losses that depend on how samples are grouped."""
    samples: int = SAMPLES
    epochs: int = 2
    clips: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `as_distributed`."""
    tolerance: float = 1e-10
    divided_tolerance: float | None = None
    """Tolerance if several ranks share a replica and round their own sums; None for the same."""
    draws: bool = False
    """True if passes draw random numbers."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the model computes."""
        return torch.float32 if self.tolerance > 1e-10 else torch.float64

    def computing(self) -> AbstractContextManager[Any]:
        """Returns the context for forward passes."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def _groups(net: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 0.03},
        ],
        lr=0.01,
    )


def _sparse(net: nn.Module) -> nn.Module:
    assert isinstance(net, Bag)
    net.bag.sparse = True
    return net


def _freeze(net: nn.Module) -> nn.Module:
    assert isinstance(net, Gpt)
    for part in (net.embedded.places, net.feedforward.mlp[0], net.attention.packed):
        part.requires_grad_(False)
    return net


class _Recomputed(nn.Module):
    """Recomputes the activations of `inner` instead of keeping them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _recompute(net: nn.Module) -> nn.Module:
    assert isinstance(net, Gpt)
    net.feedforward.mlp = _Recomputed(net.feedforward.mlp)
    return net


def _drop(net: nn.Module) -> nn.Module:
    assert isinstance(net, Gpt)
    net.feedforward.mlp = _Recomputed(nn.Sequential(nn.Dropout(0.2), net.feedforward.mlp))
    return net


class _Sometimes(nn.Module):
    """A model in which one layer is used in some forward passes only, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.always(x)
        return h + self.sometimes(x) if float(x[0, 0]) > 0 else h


def _skip(net: nn.Module) -> nn.Module:
    assert isinstance(net, Mlp)
    net.layers.insert(0, _Sometimes().to(net.layers[0].weight.dtype))
    return net


VARIATIONS: Final[dict[str, Variation]] = {
    "groups": Variation(says="several parameter groups", model="gpt", optimizer=_groups),
    "frozen": Variation(says="frozen layers, tied weights", model="gpt", prepare=_freeze),
    "scheduler": Variation(
        says="a scheduler",
        optimizer=adamw,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=6
        ),
    ),
    "scaler": Variation(says="GradScaler", scaler=True),
    "autocast": Variation(
        says="bfloat16 autocast",
        model="gpt",
        autocast=True,
        micro=True,
        tolerance=1e-5,
        divided_tolerance=1e-3,
    ),
    "recomputed": Variation(says="activation checkpointing", model="gpt", prepare=_recompute),
    "dropout": Variation(
        says="dropout in recomputed layers",
        model="gpt",
        prepare=_drop,
        micro=True,
        draws=True,
    ),
    "unused": Variation(says="layers used sometimes, or never", prepare=_skip, micro=True),
    "uneven": Variation(says="a last step with fewer samples than ranks", samples=17),
    "train_step": Variation(says="`train_step`", train_step=True),
    "accumulated": Variation(
        says="`train_step` in micro-batches", model="gpt", train_step=True, micro=True
    ),
    "sum": Variation(says='`loss_reduction="sum"`', sums=True, options={"loss_reduction": "sum"}),
    "by_hand": Variation(
        says="`auto_sync_gradients=False`", by_hand=True, options={"auto_sync_gradients": False}
    ),
    "sparse": Variation(
        says="sparse embeddings",
        model="bag",
        prepare=_sparse,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        clips=False,
    ),
    "whole_matrices": Variation(
        says="an optimizer that needs full matrices (Adafactor)",
        optimizer=lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    ),
    "checkpointed": Variation(
        says="`activation_checkpointing=True`",
        model="gpt",
        options={"activation_checkpointing": True},
    ),
    "offload": Variation(says='`offload="cpu"`', optimizer=adamw, options={"offload": "cpu"}),
    "shard_modules": Variation(says="`shard_modules=`", options={"shard_modules": [nn.Linear]}),
    "param_dtype": Variation(
        says="`param_dtype=torch.bfloat16`",
        micro=True,
        options={"param_dtype": torch.bfloat16},
        tolerance=2e-3,
    ),
    "reduce_dtype": Variation(
        says="`reduce_dtype=torch.bfloat16`",
        options={"reduce_dtype": torch.bfloat16},
        tolerance=2e-3,
    ),
    "whole_batches": Variation(
        says="`deterministic=True` without micro-batches", options={"deterministic": True}
    ),
    "compiled": Variation(
        says="`torch.compile`",
        prepare=lambda net: torch.compile(net, backend="aot_eager"),
        clips=False,
    ),
}
