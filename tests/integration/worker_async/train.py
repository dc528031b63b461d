"""The training script of the workers in these tests. It can be held at given batches."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal_worker.api as shoal
import torch
from shoal_common.formats.wire import checksum
from shoal_common.optimizers.for_torch import DelayedNesterov
from shoal_worker.asynchronous import handover
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.worker_strategies.stateful_modules import KINDS, Counter

FEATURES = 8
SAMPLES = 256
LEFT = 1000
"""Number of the hold after a loop that was left before its end."""
EPOCH_END = 2000
"""Number of the hold after the loop over the batches of epoch 0, before the scheduler's step."""


def problem() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.linspace(-1.0, 1.0, FEATURES).unsqueeze(1)
    return TensorDataset(inputs, inputs @ weights + 0.5)


def network(seed: int, *, deep: int = 0) -> nn.Module:
    """Builds the network. `deep`: number of extra layers, each in a server partition of its own."""
    torch.manual_seed(seed)
    width = 128 if deep else 16
    more = [layer for _ in range(deep) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), *more, nn.Linear(width, 1))


class RandomFeatures(nn.Module):
    """Random features drawn by the process; one of the two tables is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(FEATURES, FEATURES))
        self.register_buffer("scales", torch.rand(FEATURES), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs @ self.table * self.scales)


def counting(seen: int, net: nn.Module) -> nn.Module:
    """Puts modules with each kind of extra state, which starts at `seen`, before a network."""
    return nn.Sequential(*(Counter(kind, seen) for kind in KINDS), net)


def extra_state(state: dict[str, Any]) -> list[Any]:
    """Returns the extra state in a state dict of a model made by `counting`, in the order of
    KINDS."""
    return [state[f"{number}._extra_state"] for number in range(len(KINDS))]


def squared_error(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    inputs, targets = batch
    return {
        "squared_error": nn.functional.mse_loss(model(inputs), targets, reduction="sum"),
        "samples": torch.tensor(len(inputs)),
    }


class Moments:
    """Writes a file for each batch that the worker reaches, and holds the worker there until the
    test releases it."""

    def __init__(self, directory: Path, hold_at: Sequence[int]) -> None:
        self._directory = directory
        self._hold_at = hold_at

    def step(self, number: int) -> None:
        """Reports that a batch was received and `number` batches are done; waits here if the test
        holds it."""
        (self._directory / f"step-{number}").touch()
        if number in self._hold_at:
            while not (self._directory / f"go-{number}").exists():
                time.sleep(0.005)


def main(arguments: Sequence[str]) -> int:
    """Trains as configured. `arguments`: one JSON object; see the keys below."""
    config: dict[str, Any] = json.loads(arguments[0])
    directory = Path(config["directory"])
    moments = Moments(directory, config.get("hold_at", ()))
    if "copies_rest" in config:
        handover._REST = config["copies_rest"]  # type: ignore[misc]  # Final
    options = dict(config.get("options", {}))
    for name in ("server_timeout", "lease_ahead"):
        if f"{name}_s" in options:
            options[name] = timedelta(seconds=options.pop(f"{name}_s"))
    shoal.init()
    net = network(config.get("seed", 0), deep=config.get("deep", 0))
    if config.get("random_features"):
        net = nn.Sequential(RandomFeatures(), net)
    if "seen" in config:
        net = counting(config["seen"], net)
    kind = getattr(torch.optim, config.get("optimizer", "SGD"))
    settings = config.get("settings", {"lr": 0.05})
    if "outer" in config:
        options["outer_optimizer"] = torch.optim.SGD(net.parameters(), **config["outer"])
    if "delayed" in config:
        options["outer_optimizer"] = DelayedNesterov(net.parameters(), **config["delayed"])
    model, optimizer = shoal.as_distributed(
        net, kind(net.parameters(), **settings), strategy="async_sgd", **options
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=config.get("gamma", 1.0))
    shoal.register_state(scheduler=scheduler)
    if "resume" in config:
        shoal.resume(config["resume"])
    loader = shoal.ElasticDataLoader(
        problem(), batch_size=config.get("batch_size", 8), name="train"
    )
    evaluation = shoal.ElasticDataLoader(problem(), batch_size=64, train=False)
    first_parameters: dict[str, Any] = {}
    first_buffers: dict[str, Any] = {}
    first_seen: list[int] = []
    steps, statuses, epochs = 0, [], []
    computed_on: list[int] = []
    """Hash of the parameters in each step."""
    for epoch in loader.epochs(config.get("epochs", 1)):
        epochs.append(epoch)
        for inputs, targets in loader:
            moments.step(steps)
            if steps == config.get("leaves_before"):
                break
            if steps == 0:
                first_parameters = {name: value.tolist() for name, value in net.named_parameters()}
                first_buffers = {name: value.tolist() for name, value in net.named_buffers()}
                first_seen = [part.seen for part in net.modules() if isinstance(part, Counter)]
            computed_on.append(
                checksum(
                    torch.cat([value.detach().flatten() for value in net.parameters()]).numpy().data
                )
            )
            model.train_step(inputs, targets, nn.functional.mse_loss)
            statuses.append(bool(optimizer.step()))
            if len(statuses) == config.get("leaves_after"):
                break
            if "delay_s" in config:
                time.sleep(config["delay_s"])
            if config.get("schedule") == "iterations":
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
        if "leaves_after" in config or "leaves_before" in config:
            moments.step(LEFT)
        if config.get("schedule") == "epochs":
            moments.step(EPOCH_END + epoch)
            scheduler.step()
        if "save" in config:
            shoal.save_checkpoint(config["save"])
    sums = shoal.evaluate(model, evaluation, squared_error)
    result = {
        "steps": steps,
        "committed": sum(statuses),
        "epochs": epochs,
        "computed_on": computed_on,
        "first_parameters": first_parameters,
        "first_buffers": first_buffers,
        "first_seen": first_seen,
        "parameters": {
            name: value.tolist()
            for name, value in model.full_state_dict().items()
            if isinstance(value, torch.Tensor)
        },
        "error": sums["squared_error"] / sums["samples"],
        "lr": optimizer.param_groups[0]["lr"],
        "generation": shoal.generation(),
    }
    (directory / "result.json").write_text(json.dumps(result))
    return 0
