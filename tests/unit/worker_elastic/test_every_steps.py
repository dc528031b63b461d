"""`save_checkpoint` and `evaluate` with `every_steps=` run once every k steps."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.elastic.group.operations import Body
from shoal_worker.elastic.session.worker_process import current_session, set_session
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_session")

DATA = torch.utils.data.TensorDataset(torch.arange(24.0).view(24, 1))


def start(**options: Any) -> tuple[nn.Module, Any, shoal.ElasticDataLoader]:
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
    return model, optimizer, shoal.ElasticDataLoader(DATA, **{"global_batch_size": 4, **options})


def validation() -> shoal.ElasticDataLoader:
    return shoal.ElasticDataLoader(DATA, global_batch_size=8, train=False)


def count(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
    return {"samples": len(batch[0])}


def take_step(model: nn.Module, optimizer: Any, batch: list[torch.Tensor]) -> shoal.StepStatus:
    model(batch[0]).square().mean().backward()
    status: shoal.StepStatus = optimizer.step()
    optimizer.zero_grad()
    return status


def test_every_n_committed_steps_it_evaluates_and_otherwise_returns_none() -> None:
    model, optimizer, loader = start()
    found = {}
    for _ in loader.epochs(2):
        for batch in loader:
            take_step(model, optimizer, batch)
            found[loader.global_step] = shoal.evaluate(model, validation(), count, every_steps=5)
    assert {step: result for step, result in found.items() if result is not None} == {
        5: {"samples": 24},
        10: {"samples": 24},
    }


def test_every_n_committed_steps_it_saves_even_after_a_resume(tmp_path: Path) -> None:
    for epochs in (1, 2):
        model, optimizer, loader = start()
        shoal.resume(tmp_path)
        for _ in loader.epochs(epochs):
            for batch in loader:
                take_step(model, optimizer, batch)
                shoal.save_checkpoint(tmp_path, keep=9, every_steps=4)
        shoal.shutdown()
        set_session(None)
        if epochs == 1:
            assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4"]
    # The second run began at the checkpoint of step 4 and took steps 5 to 12.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-4", "step-8"]


def test_steps_are_counted_without_a_loader_of_shoals_and_in_micro_batches() -> None:
    model, optimizer, loader = start(micro_batch_size=2)
    evaluated = []
    for step in loader.steps():
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluated.append(shoal.evaluate(model, validation(), count, every_steps=3) is not None)
    assert evaluated == [False, False, True] * 2
    for batch in torch.utils.data.DataLoader(DATA, batch_size=4):
        take_step(model, optimizer, batch)
        evaluated.append(shoal.evaluate(model, validation(), count, every_steps=3) is not None)
    assert evaluated == [False, False, True] * 4


def test_lost_step_does_not_make_the_previous_action_due_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation is not due again after a lost step, which leaves the run at the step of the
    last evaluation."""
    model, optimizer, loader = start()
    session = current_session()
    evaluated = []
    for batch in loader:
        take_step(model, optimizer, batch)
        evaluated.append(shoal.evaluate(model, validation(), count, every_steps=2) is not None)
        monkeypatch.setattr(session.lifecycle, "outcome", shoal.StepStatus.LOST)
        assert shoal.evaluate(model, validation(), count, every_steps=2) is None
    assert evaluated == [False, True] * 3


def test_nothing_is_due_before_the_first_step_or_after_a_peeked_batch() -> None:
    model, optimizer, loader = start()
    assert shoal.evaluate(model, validation(), count, every_steps=1) is None
    for batch in loader:
        take_step(model, optimizer, batch)
        break
    assert shoal.evaluate(model, validation(), count, every_steps=1) is not None
    next(iter(loader))
    assert shoal.evaluate(model, validation(), count, every_steps=1) is None
    assert shoal.evaluate(model, validation(), count) is not None


def test_call_inside_a_step_is_refused_with_the_correct_place(tmp_path: Path) -> None:
    model, optimizer, loader = start()
    for batch in loader:
        with pytest.raises(
            PreconditionError,
            match=re.escape(
                "save_checkpoint(every_steps=2) was called inside a step; call it between"
            ),
        ):
            shoal.save_checkpoint(tmp_path, every_steps=2)
        take_step(model, optimizer, batch)
        shoal.save_checkpoint(tmp_path, every_steps=2)
    assert shoal.evaluate(model, validation(), count, every_steps=6) is not None


def test_evaluation_interrupted_by_a_return_to_a_checkpoint_uses_only_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loader = start()
    session, saved = current_session(), []
    for batch in loader:
        take_step(model, optimizer, batch)
        saved.append((model.weight.item(), copy.deepcopy(session.assemble(LocalChannel()))))
        if len(saved) == 3:
            break

    def returns_to_a_checkpoint(_: str, body: Body) -> Any:
        body(LocalChannel())
        session.replace_state(LocalChannel(), saved[0][1])
        return body(LocalChannel())

    monkeypatch.setattr(session, "operation", returns_to_a_checkpoint)
    result = shoal.evaluate(model, validation(), lambda net, batch: {"weight": net.weight.sum()})
    assert saved[0][0] != saved[2][0]
    assert result == {"weight": pytest.approx(3 * saved[0][0])}


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "5"])
def test_interval_in_steps_is_a_whole_number(tmp_path: Path, every: Any) -> None:
    model, *_ = start()
    with pytest.raises(
        ConfigurationError,
        match=re.escape(f"evaluate(every_steps={every!r}): expected a positive integer"),
    ):
        shoal.evaluate(model, validation(), count, every_steps=every)
    with pytest.raises(ConfigurationError, match="save_checkpoint"):
        shoal.save_checkpoint(tmp_path, every_steps=every)


def test_a_directory_of_another_run_is_refused_in_the_first_step_instead_of_the_first_save(
    tmp_path: Path,
) -> None:
    model, optimizer, loader = start()
    for batch in loader:
        take_step(model, optimizer, batch)
    shoal.save_checkpoint(tmp_path)  # of step 6
    shoal.shutdown()
    set_session(None)
    model, optimizer, loader = start()
    batches = iter(loader)
    take_step(model, optimizer, next(batches))
    shoal.save_checkpoint(tmp_path, every_steps=7)  # step 7 of this run will be the newest
    set_session(None)
    model, optimizer, loader = start()
    batches = iter(loader)
    take_step(model, optimizer, next(batches))
    with pytest.raises(ConfigurationError, match=r"step-6 of another run.*step 4 of this run"):
        shoal.save_checkpoint(tmp_path, every_steps=4)
