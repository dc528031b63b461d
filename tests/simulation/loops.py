"""The training scripts of simulated processes: a small model on a few samples, in each kind of loop
that users write.

A loop advances counts, moving averages and schedules only under `if optimizer.step():`, as the
documentation asks. It registers them only if members may join later or steps may be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shoal
import torch
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Sampler

from tests.simulation.processes import Process
from tests.simulation.scenario import DIVIDED, SAVING, Joins, Scenario
from tests.simulation.scheduler import own_scheduler

BATCH = 12
MICRO = 2
EPOCHS = 2
BREAKS_IN = 2
"""Step of the second epoch, from 1, at which the loop `break` ends."""
_STEP_S = 3.0
"""Virtual seconds that a step takes in runs whose partitions must end before the run does. In all
other runs a step takes only as long as its messages."""
_KEPT = 0.8
"""Decay of the averaged weights in the loop EMA."""
_WHOLE = ("ddp", "zero1", "zero2", "local_sgd")
"""Strategies whose ranks have all parameters between steps."""


class Block(nn.Module):
    """One of several equal blocks, so that strategies have units to shard."""

    def __init__(self, inputs: int, outputs: int, *, statistics: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs) if statistics else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Samples(Dataset[Any]):
    """A fixed data set of `count` samples, equal on all ranks."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)
        self._y = torch.randn(count, 3, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index], self._y[index]


class _InOrder(Sampler[int]):
    """A user's sampler with which all ranks deliberately train on the same batches."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._samples)))

    def __len__(self) -> int:
        return len(self._samples)


@dataclasses.dataclass
class Average:
    """A moving average that the loop updates."""

    value: float = 0.0
    count: int = 0

    def advance(self) -> None:
        """Advances the average after a committed step."""
        self.count += 1
        self.value = 0.9 * self.value + self.count

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


def options_of(scenario: Scenario) -> dict[str, Any]:
    """Returns the keyword options of `shoal.as_distributed` for a scenario."""
    options: dict[str, Any] = {"minimum_parameter_group_size": 8}
    if scenario.loop == "micro-batches" and scenario.strategy not in (*DIVIDED, "local_sgd"):
        options["deterministic"] = True
    if scenario.strategy == "hsdp":
        options["shard_size"] = 1 if scenario.ranks % 2 else 2
    if scenario.strategy == "hybrid":
        options |= (
            {"data_parallel_strategy": "zero2"}
            if scenario.ranks % 2
            else {"tensor_parallel_size": 2, "elementwise_optimizer": True}
        )
    if scenario.strategy == "pipeline":
        options |= {"pipeline_parallel_size": 3 if scenario.ranks % 2 else 2}
    if scenario.strategy == "local_sgd":
        options["sync_every"] = 2
    return options


def is_bitwise(scenario: Scenario) -> bool:
    """Returns whether the result is independent of the number of ranks at each step."""
    return "deterministic" in options_of(scenario)


def train(process: Process) -> None:
    """Runs the training script of a process."""
    Training(process).run()


class Training:
    """The training script of one process."""

    def __init__(self, process: Process) -> None:
        self.process, self.scenario = process, process.world.scenario
        scenario = self.scenario
        dtype = torch.float32 if is_bitwise(scenario) else torch.float64
        self.net = _make_net(scenario, dtype)
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=0.125)
            if scenario.strategy == "local_sgd"
            else torch.optim.Adam(self.net.parameters(), lr=0.02)
        )
        self.model, self.optimizer = shoal.as_distributed(
            self.net, optimizer, strategy=scenario.strategy, **options_of(scenario)
        )
        self.samples = Samples(BATCH * scenario.steps, dtype)
        micro = MICRO if scenario.loop == "micro-batches" else None
        self.plain = (
            DataLoader(self.samples, batch_size=BATCH // 3, sampler=_InOrder(self.samples))
            if scenario.loop == "plain"
            else None
        )
        self.loader = shoal.ElasticDataLoader(
            self.samples,
            global_batch_size=BATCH,
            micro_batch_size=micro,
            seed=3,
            balance=micro is not None,
        )
        self.evaluated = shoal.ElasticDataLoader(self.samples, global_batch_size=20, train=False)
        self.scheduler = (
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
            if scenario.loop == "scheduler"
            else None
        )
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
            if scenario.loop == "scaler"
            else None
        )
        # A copy of the whole model, made on every rank. It registers itself.
        self.averaged = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(_KEPT))
            if scenario.loop == "EMA"
            else None
        )
        self.average = Average()
        # Steps may be undone after others have counted them: with a checkpoint, and in a round of
        # local_sgd.
        undone = scenario.loop in SAVING or scenario.strategy == "local_sgd"
        others = (
            scenario.replaced
            or undone
            or any(isinstance(fault, Joins) for fault in scenario.faults)
        )
        if self.scaler is not None:
            shoal.register_state(scaler=self.scaler)
        if others:
            shoal.register_state(average=self.average)
            if self.scheduler is not None:
                shoal.register_state(scheduler=self.scheduler)
        self.after_step: Callable[[int], None] = getattr(self, f"_{scenario.loop}", lambda _: None)

    def run(self) -> None:
        """Runs the loop and the operations after it."""
        if self.scenario.loop in SAVING:
            shoal.resume(self._checkpoints)
        if self.plain is not None:
            self._run_plain(self.plain)
        else:
            self._run_dealt()
        self._end()

    def _run_plain(self, loader: DataLoader[Any]) -> None:
        """Trains over a DataLoader of torch's, which gives every rank the same batches."""
        for _ in range(EPOCHS):
            for batch in loader:
                self._pass(*batch)
                self._step()

    def _run_dealt(self) -> None:
        last = self.scenario.steps + BREAKS_IN if self.scenario.loop == "break" else -1
        for _ in self.loader.epochs(EPOCHS):
            for index, batch in enumerate(
                self.loader.steps() if self.scenario.loop == "micro-batches" else self.loader
            ):
                if self.scenario.loop == "micro-batches":
                    for x, y in batch:
                        self._pass(x, y)
                else:
                    self._pass(*batch)
                self._step()
                self.after_step(index)
                if self.loader.global_step == last:
                    break
            if self.loader.global_step == last:
                break

    def _pass(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.scenario.strategy == "pipeline":
            self.model.train_step(x, y, lambda output, target: ((output - target) ** 2).mean())
            return
        output = self.model(x)
        # Under local_sgd gradients do not depend on the parameters, so that the mean of the ranks'
        # steps is the step of all samples.
        loss = (
            (output * y).mean()
            if self.scenario.strategy == "local_sgd"
            else ((output - y) ** 2).mean()
        )
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step(self) -> None:
        if self.scenario.loop == "clip":
            # Under local_sgd each rank clips its own gradients, by which the result depends on who
            # has which samples.
            self.model.clip_grad_norm_(0.25 if self.scenario.strategy != "local_sgd" else 1e6)
            with torch.no_grad():
                self.model(self.samples[0][0][None])
        if self.scaler is None:
            status = self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            status = self.scaler.step(self.optimizer)
            self.scaler.update()
        if status:
            self.average.advance()
            if self.averaged is not None:
                self._average(self.averaged)
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()
        session, diary = current_session(), self.process.diary
        self.process.world.step_ended(self.process, session.steps)
        if self.scenario.parted:
            own_scheduler().pause(_STEP_S)
        if session.is_redoing:
            diary.returned.add(len(diary.statuses))
        diary.statuses.append((session.steps, status.value))
        if self.scenario.strategy in _WHOLE and not getattr(self.model, "steps_in_round", 0):
            diary.values[session.steps] = flattened(self.net)

    def _average(self, averaged: AveragedModel) -> None:
        """Updates the averaged weights as documented: by torch's `update_parameters` if this rank
        has all parameters, otherwise from `gather_full_parameters`. Does nothing within a round of
        local_sgd, where the ranks differ."""
        if self.scenario.strategy not in _WHOLE:
            with torch.no_grad():
                for kept, new in zip(
                    averaged.parameters(), self.model.gather_full_parameters().values(), strict=True
                ):
                    kept.lerp_(new, 1 - _KEPT)
        elif not getattr(self.model, "steps_in_round", 0):
            averaged.update_parameters(self.model)

    def _evaluate(self, _: int) -> None:
        if self.loader.global_step % 2 == 0:
            self._record_evaluation()

    def _save(self, _: int) -> None:
        if self.loader.global_step % 2 == 0:
            shoal.save_checkpoint(self._checkpoints)

    def _operations(self, _: int) -> None:
        """Performs each operation between steps that no other loop performs."""
        diary, steps = self.process.diary, current_session().steps
        if self.loader.global_step % 2 == 0:
            diary.answers.append((steps, shoal.all_reduce(1.0 + steps, "mean")))
            shoal.gather({"steps": steps})
            shoal.barrier()
            self.optimizer.should_early_stop(float(steps), patience=100)
            torch.distributed.all_reduce(torch.ones(2), group=shoal.process_group())
            self.model.full_state_dict()
            shoal.save_checkpoint(self._checkpoints)

    @property
    def _checkpoints(self) -> Path:
        return self.process.world.checkpoints

    def _enumerate(self, index: int) -> None:
        if index % 2 == 1:
            self._record_evaluation()

    def _record_evaluation(self) -> None:
        sums = shoal.evaluate(self.model, self.evaluated, _sums)
        self.process.diary.answers.append((current_session().steps, sums["loss"]))

    def _end(self) -> None:
        """Evaluates, saves and records the final state. A rank that leaves its loop early with the
        full model takes part in no further operations with the others."""
        if self.scenario.loop == "break" and self.scenario.strategy in _WHOLE:
            state = self.net.state_dict()
        else:
            self._record_evaluation()
            if self.scenario.loop in SAVING:
                shoal.save_checkpoint(self._checkpoints)
            state = self.model.full_state_dict()
        self.process.diary.ended_with = {
            "state": {name: value.clone() for name, value in sorted(state.items())},
            "optimizer": {}
            if self.scenario.strategy == "local_sgd" or self.scenario.loop == "break"
            else self.optimizer.state_dict(),
            "averaged": {}
            if self.averaged is None
            else {name: value.clone() for name, value in self.averaged.state_dict().items()},
            "steps": current_session().steps,
            "count": self.average.count,
            "average": self.average.value,
            "rate": self.optimizer.param_groups[0]["lr"],
            "scale": self.scaler.get_scale() if self.scaler is not None else None,
        }


def flattened(net: nn.Module) -> torch.Tensor:
    """Returns the parameters and buffers of `net` as one float64 vector."""
    return torch.cat(
        [
            value.detach().to(torch.float64).reshape(-1)
            for _, value in sorted(net.state_dict().items())
        ]
    )


def _sums(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    x, y = batch
    return {"loss": float(((model(x) - y) ** 2).sum())}


def _make_net(scenario: Scenario, dtype: torch.dtype) -> nn.Module:
    statistics = scenario.loop == "micro-batches" and scenario.strategy not in (
        *DIVIDED,
        "local_sgd",
    )
    blocks = [Block(5, 6, statistics=statistics), Block(6, 4, statistics=statistics)]
    net = (
        nn.Linear(5, 3)
        if scenario.strategy == "local_sgd"
        else nn.Sequential(*blocks, nn.Linear(4, 3))
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
            )
    return net.to(dtype)
