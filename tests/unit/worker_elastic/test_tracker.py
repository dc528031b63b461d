"""Each figure of a tracked run belongs to the right step, however the script reports its loss, and
a failing sink does not stop the training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.tracking.tracker import TrackedRun
from torch import nn

from tests import mlruns
from tests.events import points

pytestmark = pytest.mark.usefixtures("fresh_session")

DATA = torch.utils.data.TensorDataset(torch.ones(40, 1))
STEPS = 10


class Memory:
    """A sink that stores everything in memory."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.runs: list[TrackedRun] = []
        self.closed = 0
        self.values: dict[str, list[tuple[int, float]]] = {}

    def open(self, *, run: TrackedRun, step: int) -> None:
        self.opened.append(step)
        self.runs.append(run)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append((step, value))

    def event(self, step: int, text: str) -> None:
        raise AssertionError("alone nothing happens")

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""

    def close(self, *, ended: bool) -> None:
        self.closed += 1


def begin(*sinks: Any, **options: Any) -> tuple[Any, Any, shoal.ElasticDataLoader]:
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
    loader = shoal.ElasticDataLoader(DATA, global_batch_size=4)
    shoal.track(*sinks, **options)
    return model, optimizer, loader


def train(style: str, sink: Any, **options: Any) -> None:
    """Trains with loss n in step n, which `style` reports in one of several ways."""
    model, optimizer, loader = begin(sink, **options)
    for (x,) in loader:
        number = loader.global_step + 1
        if style == "train_step":
            model.train_step(x, x, lambda output, _, number=number: 0 * output.sum() + number)
        else:
            model(x).square().mean().backward()
        if style == "before step()":
            shoal.report(loss=number)
        optimizer.step()
        if style == "after step()":
            shoal.report(loss=number)
        optimizer.zero_grad()
    shoal.shutdown()


@pytest.mark.parametrize("style", ["before step()", "after step()", "train_step"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_loss_belongs_to_the_step_that_it_was_told_for(style: str, every: int) -> None:
    memory = Memory()
    train(style, memory, every_steps=every)
    due = [step for step in range(1, STEPS + 1) if step % every == 0]
    assert memory.values["shoal/loss"] == [(step, float(step)) for step in due]
    for name in ("world_size", "generation", "lost_steps", "samples_per_s_per_rank"):
        assert [step for step, _ in memory.values[f"shoal/{name}"]] == due
    assert (memory.opened, memory.closed) == ([due[0]], 1)


def test_a_loop_that_tells_no_loss_has_none() -> None:
    memory = Memory()
    train("not at all", memory, every_steps=1)
    assert "shoal/loss" not in memory.values


def test_a_loss_told_every_few_steps_is_not_told_for_those_between() -> None:
    memory = Memory()
    model, optimizer, loader = begin(memory, every_steps=1)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.global_step % 4 == 0:
            shoal.report(loss=loader.global_step)
    shoal.shutdown()
    assert memory.values["shoal/loss"] == [(4, 4.0), (8, 8.0)]


def test_other_numbers_are_written_by_their_names_for_the_step_they_are_reported_in() -> None:
    memory = Memory()
    model, optimizer, loader = begin(memory, every_steps=2)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shoal.report(loss=loader.global_step, lr=torch.tensor(loader.global_step / 8))
        if loader.global_step == 4:
            shoal.report(accuracy=0.5)
    shoal.shutdown()
    steps = range(2, STEPS + 1, 2)
    assert memory.values["shoal/loss"] == [(step, float(step)) for step in steps]
    assert memory.values["lr"] == [(step, step / 8) for step in steps]
    assert memory.values["accuracy"] == [(4, 0.5)]


def test_a_sink_that_cannot_be_written_to_is_given_up_and_training_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    memory = Memory()
    model, optimizer, loader = begin(
        shoal.TensorBoard(tmp_path / "file" / "runs"), memory, every_steps=1
    )
    with caplog.at_level(logging.ERROR):
        for (x,) in loader:
            model(x).square().mean().backward()
            assert optimizer.step()
            optimizer.zero_grad()
    assert [record.message for record in caplog.records if "was dropped" in record.message] == [
        "TensorBoard could not be written to and was dropped: NotADirectoryError: [Errno 20] Not a "
        f"directory: '{tmp_path / 'file' / 'runs'}'"
    ]
    assert len(memory.values["shoal/world_size"]) == STEPS


def test_tensorboard_reads_it_as_one_run(tmp_path: Path) -> None:
    train("after step()", shoal.TensorBoard(tmp_path), every_steps=1)
    assert points(tmp_path, "shoal/loss") == [(step, float(step)) for step in range(1, STEPS + 1)]


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[tensorboard\]'"):
        shoal.TensorBoard(tmp_path)


def test_mlflow_has_one_run_for_each_key_however_often_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in mlruns.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    sink = shoal.MLflow(mlruns.EXPERIMENT)
    for step, key in enumerate("aba", start=1):
        sink.open(run=TrackedRun(job="train", key=key), step=step)
        sink.scalars(step, {"shoal/loss": float(step)})
        sink.close(ended=True)
    found = {run.data.tags["shoal.run"]: run for run in mlruns.runs(tmp_path)}
    assert {key: mlruns.points(tmp_path, run, "shoal/loss") for key, run in found.items()} == {
        "a": [(1, 1.0), (3, 3.0)],
        "b": [(2, 2.0)],
    }
    assert [run.info.status for run in found.values()] == ["FINISHED"] * 2
    assert len(mlruns.runs(tmp_path)) == 2


def test_a_run_alone_has_a_key_and_no_job() -> None:
    memory = Memory()
    train("after step()", memory, every_steps=1)
    (run,) = memory.runs
    assert run.key
    assert not run.job


def test_without_mlflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="expected the name of an experiment"):
        shoal.MLflow("")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[mlflow\]'"):
        shoal.MLflow("digits")


def test_every_how_many_steps_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"every_steps=0\): expected 1 or more"):
        begin(Memory(), every_steps=0)
