"""Registered state: gates of schedulers and scalers after lost steps, and states that wait for their object."""

import copy

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.registered import RegisteredState


def scheduler() -> torch.optim.lr_scheduler.StepLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    return lr


def test_a_scheduler_does_not_advance_after_a_void_step() -> None:
    registered, lr = RegisteredState(), scheduler()
    registered.register("lr", lr)
    registered.step_void()
    lr.step()
    assert lr.get_last_lr() == [1.0]
    registered.step_begins()
    lr.step()
    assert lr.get_last_lr() == [0.5]


def test_the_gate_stays_out_of_the_schedulers_state() -> None:
    registered, lr = RegisteredState(), scheduler()
    before = set(lr.state_dict())
    registered.register("lr", lr)
    assert set(lr.state_dict()) == before
    assert isinstance(lr, torch.optim.lr_scheduler.StepLR)


def test_a_copy_of_a_registered_scheduler_steps_itself_and_is_not_gated() -> None:
    registered, lr = RegisteredState(), scheduler()
    registered.register("lr", lr)
    copied = copy.copy(lr)
    registered.step_void()
    copied.step()
    assert (lr.last_epoch, copied.last_epoch) == (0, 1)


def test_a_state_waits_for_an_object_that_is_registered_later() -> None:
    donor, donors_lr = RegisteredState(), scheduler()
    donor.register("lr", donors_lr)
    donors_lr.step()
    taker = RegisteredState()
    taker.restore(donor.capture())
    late = scheduler()
    taker.register("lr", late)
    assert late.last_epoch == donors_lr.last_epoch


def test_an_object_without_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"register_state\(ema=...\): int has no state_dict"):
        RegisteredState().register("ema", 3)


def test_a_name_belongs_to_one_object() -> None:
    registered = RegisteredState()
    registered.register("lr", scheduler())
    with pytest.raises(ConfigurationError, match="taken"):
        registered.register("lr", scheduler())
