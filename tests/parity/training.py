"""The training of a cell's ranks, and the same training in one process in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import shoal
import torch
import torch.nn.functional as F
from shoal_worker.randomness import seed_generators
from torch import nn
from torch.utils.data import Dataset

from tests.parity.models import make_data, make_model
from tests.parity.variations import OPTIMIZERS, Variation

BATCH: Final = 8
MICRO: Final = 2
MAX_NORM: Final = 0.5
GROUPED: Final = {"cnn"}
"""Models whose loss depends on how samples are grouped."""

State = dict[str, torch.Tensor]
Seen = list[list[list[int]]]
"""The samples of each micro-batch of each step, or of each step's batch."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Description of a training run."""

    variation: Variation
    strategy: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The final state of one rank."""

    state: State
    """The full parameters and buffers."""
    seen: Seen
    """Samples that this rank received."""


def plain(model: str, optimizer: str, check: str) -> Variation:
    """Returns the training of the matrix's cells: in float64, in float32, or bitwise."""
    return Variation(
        model=model,
        optimizer=OPTIMIZERS[optimizer],
        micro=check == "bitwise" or model in GROUPED,
        clips=check != "bitwise",
        tolerance=1e-10 if check == "float64" else 1e-5,
    )


class _Numbered(Dataset[Any]):
    """A dataset of the first `size` samples, each with its number."""

    def __init__(self, data: Dataset[Any], size: int) -> None:
        self._data, self._size = data, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return *self._data[index], index


def train(what: Training) -> Outcome:
    """Trains one rank and returns its outcome."""
    how = what.variation
    net = how.prepare(make_model(how.model, how.dtype))
    model, optimizer = shoal.as_distributed(
        net,
        how.optimizer(net),
        strategy=what.strategy,
        minimum_parameter_group_size=64,
        **what.options,
        **how.options,
    )
    scheduler = how.scheduler(optimizer) if how.scheduler is not None else None
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if how.scaler else None
    shoal.register_state(
        **{
            name: one
            for name, one in (("scheduler", scheduler), ("scaler", scaler))
            if one is not None
        }
    )
    data = _Numbered(make_data(how.model, how.dtype), how.samples)
    loader = shoal.ElasticDataLoader(
        data, global_batch_size=BATCH, micro_batch_size=MICRO if how.micro else None, shuffle=False
    )
    seen: Seen = []
    for _ in loader.epochs(how.epochs):
        for step in loader.steps() if how.micro else ([batch] for batch in loader):
            seen.append([])
            for x, y, numbers in step:
                _pass(how, model, x, y, scaler)
                seen[-1].append(numbers.tolist())
            if how.by_hand:
                model.synchronize_gradients()
            if how.clips:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                model.clip_grad_norm_(MAX_NORM)
            assert scaler.step(optimizer) if scaler is not None else optimizer.step()
            if scaler is not None:
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return Outcome(model.full_state_dict(), seen)


def _pass(
    how: Variation,
    model: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    scaler: torch.amp.GradScaler | None,
) -> None:
    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum" if how.sums else "mean")

    if how.train_step:
        with how.computing():
            loss = model.train_step(x, y, loss_of)
        if scaler is not None:
            scaler.scale(loss)
        return
    with how.computing():
        loss = loss_of(model(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


class Alone:
    """One process in plain torch, or one of several that train separately."""

    def __init__(self, how: Variation) -> None:
        self.net = how.prepare(make_model(how.model, how.dtype))
        self._how = how
        self._data = make_data(how.model, how.dtype)
        self._optimizer = how.optimizer(self.net)
        self._scheduler = how.scheduler(self._optimizer) if how.scheduler is not None else None

    def step(self, epoch: int, number: int, parts: list[list[int]]) -> None:
        """Takes step `number` of an epoch on the samples of its micro-batches. Losses are weighted
        by their numbers of samples."""
        total = sum(len(samples) for samples in parts)
        for samples in parts:
            if self._how.micro:
                seed_generators((0, epoch, number, (samples[0] - number * BATCH) // MICRO))
            x, y = self._data[samples]
            with self._how.computing():
                loss = F.cross_entropy(self.net(x), y)
            (loss * (len(samples) if self._how.sums else len(samples) / total)).backward()
        if self._how.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()

    @property
    def state(self) -> State:
        """The parameters."""
        own = getattr(self.net, "_orig_mod", self.net)  # set by torch.compile
        return {name: p.detach() for name, p in own.named_parameters()}


def _steps(how: Variation) -> Iterable[tuple[int, int, range]]:
    """Yields the epoch, the step in the epoch, and the samples."""
    for epoch in range(how.epochs):
        for number, start in enumerate(range(0, how.samples, BATCH)):
            yield epoch, number, range(start, min(start + BATCH, how.samples))


def alone(how: Variation) -> State:
    """Trains in one process and returns the parameters."""
    process = Alone(how)
    for epoch, number, samples in _steps(how):
        size = MICRO if how.micro else BATCH
        process.step(
            epoch,
            number,
            [list(samples[begin : begin + size]) for begin in range(0, len(samples), size)],
        )
    return process.state


@functools.cache
def alone_plainly(model: str, optimizer: str, check: str, *, grouped: bool) -> State:
    """Trains as the matrix's cells do, in one process in plain torch.

    grouped: True for micro-batches.
    """
    return alone(replace(plain(model, optimizer, check), micro=grouped, clips=True))


def apart(how: Variation, seen: list[Seen], *, sync_every: int) -> State:
    """Returns the parameters after local SGD in plain torch. Each rank has a replica that trains on
    the samples of that rank (`seen`, by rank). The replicas are averaged after each round, weighted
    by their samples in it."""
    processes = [Alone(how) for _ in seen]
    had = [0] * len(seen)
    steps = list(_steps(how))
    for index, (epoch, number, _) in enumerate(steps):
        given: set[int] = set()
        for rank, process in enumerate(processes):
            # otherwise the batch is a placeholder for missing samples
            parts = [part for part in seen[rank][index] if given.isdisjoint(part)]
            given.update(*parts)
            had[rank] += sum(len(samples) for samples in parts)
            process.step(epoch, number, parts)
        if (number + 1) % sync_every == 0 or index + 1 == len(steps) or steps[index + 1][1] == 0:
            _average([process.net for process in processes], [float(count) for count in had])
            had = [0] * len(seen)
    return processes[0].state


@torch.no_grad()
def _average(nets: list[nn.Module], weights: list[float]) -> None:
    for same in zip(*(net.parameters() for net in nets), strict=True):
        mean = sum(p * weight for p, weight in zip(same, weights, strict=True)) / sum(weights)
        for p in same:
            p.copy_(mean)
