"""A registered GradScaler around a lost step: its scale and its internal state stay as they were
before the step."""

from __future__ import annotations

import torch
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState


class Training:
    """A parameter trained with a registered scaler. `step` calls the scaler as a user's loop does:
    `scale(...)`, `step()` and `update()`."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.registered = RegisteredState()
        self.registered.register("scaler", self.scaler)

    def step(self, *, lost: bool, factor: float = 1.0) -> None:
        self.registered.step_begins()
        self.optimizer.zero_grad()
        self.scaler.scale(self.parameter.sum() * factor).backward()
        self.scaler.unscale_(self.optimizer)
        if lost:
            self.registered.step_aborted()
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()


def test_the_scale_neither_grows_nor_shrinks_in_a_lost_step() -> None:
    training = Training()
    training.step(lost=True, factor=float("inf"))
    assert training.scaler.get_scale() == 4.0
    training.step(lost=False)
    assert training.scaler.get_scale() == 8.0


def test_a_step_after_a_lost_one_can_be_unscaled_and_is_applied_once() -> None:
    training = Training()
    training.step(lost=True)
    training.step(lost=False)  # torch refuses a second unscale_() in one step
    assert torch.allclose(training.parameter, torch.tensor([0.9]))
