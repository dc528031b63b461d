"""Plain values that a script registers are read and written as attributes, and are part of the
run's state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import shoal
import torch
from shoal_worker.elastic.state.run_values import RunValues, values_in
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState


def registered_with(**values: Any) -> tuple[RegisteredState, RunValues]:
    """Registers plain values as `register_state` does."""
    registered, made = RegisteredState(), values_in(values)
    for name, value in made.items():
        registered.register(name, value, copied=True)
    return registered, RunValues(made)


def test_a_joiner_and_a_resumed_script_get_the_values_of_the_run() -> None:
    peers, run = registered_with(best=0.0, history=[], kept=None)
    run.best, run.kept = 0.9, torch.ones(2)
    run.history.append(("epoch", 1))
    captured = peers.capture()

    early, joined = registered_with(best=0.0, history=[], kept=None)
    early.restore(captured)
    assert (joined.best, joined.history, joined.kept.tolist()) == (0.9, [("epoch", 1)], [1, 1])

    late = RegisteredState()
    late.restore(captured)
    values = values_in({"best": 0.0})
    late.register("best", values["best"], copied=True)
    assert RunValues(values).best == 0.9


def test_lost_step_restores_values() -> None:
    registered, run = registered_with(seen=0, history=[])
    for lost in (False, True, False):
        registered.put_back_again()
        registered.step_begins()
        registered.step_taken(may_be_lost=True)
        run.seen += 12
        run.history.append(run.seen)
        if lost:
            registered.step_aborted()
        else:
            registered.step_committed()
    assert (run.seen, run.history) == (24, [12, 24])


def test_values_are_loaded_into_the_objects_that_the_script_registered() -> None:
    peers, run = registered_with(
        history=[1], average={"w": torch.ones(2)}, seen={3}, total=torch.ones(2), counts=np.ones(2)
    )
    run.counts[0] = 5
    history, average, seen = [], {"w": torch.zeros(2), "old": 0}, {4}
    total, counts = torch.zeros(2), np.zeros(2)
    early, joined = registered_with(
        history=history, average=average, seen=seen, total=total, counts=counts
    )
    early.restore(copy.deepcopy(peers.capture()))
    assert (history, seen, total.tolist(), counts.tolist()) == ([1], {3}, [1, 1], [5, 1])
    assert (list(average), average["w"].tolist()) == (["w"], [1, 1])
    assert joined.history is history
    assert joined.total is total


def test_values_that_share_an_object_are_loaded_apart() -> None:
    registered, run = registered_with(best=[], last=[])
    run.last.append(1)
    registered.step_begins()
    registered.step_taken(may_be_lost=True)
    run.best = run.last
    registered.step_aborted()
    assert (run.best, run.last) == ([], [1])


@pytest.mark.parametrize(
    ("own", "loaded"),
    [
        (torch.zeros(2), torch.ones(3)),
        (torch.zeros(1).expand(2), torch.ones(2)),
        (np.broadcast_to(np.zeros(1), (2,)), np.ones(2)),
        ([1], (1, 2)),
        (None, [1]),
    ],
)
def test_a_value_that_cannot_be_written_is_replaced(own: Any, loaded: Any) -> None:
    peers, _ = registered_with(value=loaded)
    early, joined = registered_with(value=own)
    early.restore(peers.capture())
    assert joined.value is loaded


def test_unregistered_name_is_refused() -> None:
    _, run = registered_with(best=0.0, epoch=1)
    message = r"'bset' is not a value of the run's state; expected one passed .* \(best, epoch\)"
    with pytest.raises(AttributeError, match=message):
        run.bset = 1.0
    with pytest.raises(AttributeError, match=message):
        _ = run.bset
    assert repr(run) == "RunValues(best=0.0, epoch=1)"


def test_register_state_takes_objects_and_values_together() -> None:
    try:
        net = torch.nn.Linear(1, 1)
        run = shoal.register_state(best=0.5, net=net)
        run.best += 0.25
        assert run.best == 0.75
        with pytest.raises(AttributeError, match="'net' is not a value"):
            _ = run.net
        with pytest.raises(
            shoal.ConfigurationError, match="'best' is already used by another object"
        ):
            shoal.register_state(best=1.0)
        assert shoal.is_main_process()
    finally:
        shoal.shutdown()
