"""Measures training steps on one device for several ways to train (mixed precision, compilation,
data workers): how long a step takes, and which operations the host queues on the device.

Each way is measured with plain torch and with Shoal, one after the other; the difference is Shoal's
overhead. Both process the same number of samples with the same model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.traces import Counts, counted
from benchmarks.workers.blocks import MANY_EPOCHS, SAMPLES_PER_RANK, TOKENS, WORDS, Decoder

BATCH: Final = 16
_WARM: Final = 5


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    strategy: str | None = None
    """Shoal's strategy; None: plain torch."""
    autocast: torch.dtype | None = None
    scaled: bool = False
    """True if a GradScaler scales the losses."""
    compiled: bool = False
    workers: int = 0
    """Number of data workers, whose batches pass through pinned memory."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Measurements of the steps in one way to train."""

    way: Way
    seconds: tuple[float, ...]
    """Duration of each step, until the device had completed it."""
    counts: Counts
    peak_bytes: int
    """Peak of the allocated device memory in bytes; 0 without a device."""


def ways(*, compiled: bool = True) -> list[Way]:
    """Returns the ways to train that are measured. `compiled`: True to include torch.compile, which
    needs a compiler."""
    variants: list[dict[str, Any]] = [
        {"name": "fp32"},
        {"name": "bf16 autocast", "autocast": torch.bfloat16},
        {"name": "fp16 autocast, GradScaler", "autocast": torch.float16, "scaled": True},
        {"name": "fp32, 2 data workers, pinned", "workers": 2},
    ]
    if compiled:
        variants.append({"name": "fp32, torch.compile", "compiled": True})
    systems: list[str | None] = [None, "ddp"]
    each = [
        Way(**{**variant, "name": f"{strategy or 'torch'}: {variant['name']}"}, strategy=strategy)
        for variant in variants
        for strategy in systems
    ]
    return [
        *each,
        *(
            Way(name=f"{strategy}: fp32", strategy=strategy)
            for strategy in ("zero1", "zero2", "zero3")
        ),
    ]


def take(way: Way, *, device: torch.device, width: int, steps: int) -> Taken:
    """Takes `steps` steps in one way and measures them, in a separate session."""
    (taken,) = shoal.launch(_take, way, device, width, steps, world_size=1)
    return taken


def _take(way: Way, device: torch.device, width: int, steps: int) -> Taken:
    torch.manual_seed(0)
    module: nn.Module = Decoder(width).to(device)
    module_optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    words = torch.randint(
        0, WORDS, (SAMPLES_PER_RANK, TOKENS + 1), generator=torch.Generator().manual_seed(1)
    )
    dataset = TensorDataset(words)
    options: dict[str, Any] = {
        "num_workers": way.workers,
        "pin_memory": way.workers > 0 and device.type == "cuda",
    }
    model: Any = module
    optimizer: Any = module_optimizer
    if way.strategy is not None:
        model, optimizer = shoal.as_distributed(module, module_optimizer, strategy=way.strategy)
        loader: Any = shoal.ElasticDataLoader(dataset, global_batch_size=BATCH, **options)
    else:
        loader = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, **options)
    called = torch.compile(model) if way.compiled else model
    scaler = torch.amp.GradScaler(device.type) if way.scaled else None
    batches = _for_ever(loader)

    def step() -> None:
        tokens = next(batches)[0].to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, way.autocast, enabled=way.autocast is not None):
            logits = called(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    for _ in range(_WARM):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = tuple(_timed(step, device) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Taken(
        way=way, seconds=seconds, counts=counted(step, steps=min(steps, 5)), peak_bytes=peak
    )


def _timed(step: Callable[[], None], device: torch.device) -> float:
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _for_ever(loader: Any) -> Iterator[Any]:
    """Yields the batches of one epoch after another, without end."""
    if isinstance(loader, DataLoader):
        while True:
            yield from loader
    for _ in loader.epochs(MANY_EPOCHS):
        yield from loader
