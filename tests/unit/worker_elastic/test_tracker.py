"""Each figure of a tracked run belongs to the right step, no matter how the script reports its
loss, and a tracker that fails or hangs does not delay training."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.tracking.delivery import Delivery
from shoal_worker.tracking.sinks import Event, EventKind, Points, Report, TrackedRun
from shoal_worker.tracking.tracker import SessionValues, changes
from torch import nn

from tests import mlruns, wandbruns
from tests.events import points
from tests.missing import pretend_missing
from tests.zygote.children import eventually

pytestmark = pytest.mark.usefixtures("fresh_session")

DATA = torch.utils.data.TensorDataset(torch.ones(40, 1))
STEPS = 10


class Memory:
    """A sink that stores everything in memory."""

    on_every_rank = False

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.runs: list[TrackedRun] = []
        self.closed: list[bool] = []
        self.values: dict[str, list[tuple[int, float]]] = {}

    def open(self, *, run: TrackedRun, step: int) -> None:
        self.opened.append(step)
        self.runs.append(run)

    def write(self, reports: Sequence[Report]) -> None:
        for report in reports:
            assert isinstance(report, Points), "alone nothing happens"
            for name, value in report.values.items():
                self.values.setdefault(name, []).append((report.step, value))

    def close(self, *, ended: bool) -> None:
        self.closed.append(ended)


class Stuck(Memory):
    """A sink of a tracker that never answers, until the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def open(self, *, run: TrackedRun, step: int) -> None:
        super().open(run=run, step=step)
        self.ends.wait()


class Slow(Memory):
    """A sink that writes nothing until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def write(self, reports: Sequence[Report]) -> None:
        self.writing.set()
        assert self.go_on.wait(60)
        super().write(reports)


class Away(Memory):
    """A sink that cannot be opened until `back` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()
        self.attempts = 0

    def open(self, *, run: TrackedRun, step: int) -> None:
        self.attempts += 1
        if not self.back.is_set():
            raise ConnectionRefusedError("nobody listens")
        super().open(run=run, step=step)


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
def test_loss_belongs_to_the_step_it_was_reported_for(style: str, every: int) -> None:
    memory = Memory()
    train(style, memory, every_steps=every)
    due = [step for step in range(1, STEPS + 1) if step % every == 0]
    last = [STEPS] if due[-1] < STEPS else []
    assert memory.values["shoal/loss"] == [(step, float(step)) for step in due + last]
    for name in ("world_size", "generation", "lost_steps", "samples_per_s_per_rank"):
        assert [step for step, _ in memory.values[f"shoal/{name}"]] == due
    assert (memory.opened, memory.closed) == ([1], [True])


def test_a_loop_that_reports_no_loss_has_none() -> None:
    memory = Memory()
    train("not at all", memory, every_steps=1)
    assert "shoal/loss" not in memory.values


def test_loss_reported_every_few_steps_is_not_repeated_in_between() -> None:
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


@pytest.mark.parametrize("within", [False, True])
def test_numbers_reported_once_per_epoch_and_the_last_ones_are_written(within: bool) -> None:
    """Their steps are not multiples of `every_steps`."""
    memory = Memory()
    model, optimizer, loader = begin(memory, every_steps=3)
    for (x,) in loader:
        model(x).square().mean().backward()
        if within and loader.global_step + 1 in (4, 5, 8):
            shoal.report(accuracy=loader.global_step + 1)
        optimizer.step()
        optimizer.zero_grad()
        if not within and loader.global_step in (4, 5, 8):
            shoal.report(accuracy=loader.global_step)
    shoal.report(final=0.5)
    shoal.shutdown()
    assert memory.values["accuracy"] == [(4, 4.0), (8, 8.0)]
    assert memory.values["final"] == [(STEPS, 0.5)]
    assert memory.opened == [1]


def test_other_numbers_are_written_by_name_for_the_step_they_were_reported_in() -> None:
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


def losses(memory: Memory) -> list[int]:
    return [step for step, _ in memory.values["shoal/loss"]]


def test_unavailable_tracker_receives_everything_on_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away, memory = Away(), Memory()
    model, optimizer, loader = begin(away, memory, every_steps=1)
    with caplog.at_level(logging.INFO):
        for (x,) in loader:
            model(x).square().mean().backward()
            assert optimizer.step()
            shoal.report(loss=loader.global_step)
            optimizer.zero_grad()
            if loader.global_step == 5:
                eventually(lambda: away.attempts >= 3, "three attempts")
                away.back.set()
        shoal.shutdown()
    steps = list(range(1, STEPS + 1))
    assert (losses(memory), losses(away)) == (steps, steps)
    messages = [text for text in caplog.messages if text.startswith("Away")]
    assert messages == [
        "Away is not accepting reports; up to 10000 reports are buffered until it does: "
        "ConnectionRefusedError: nobody listens",
        "Away is accepting reports again",
    ]


def test_tracker_that_stays_unavailable_delays_nobody_and_the_log_lists_its_gaps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        train("not at all", shoal.TensorBoard(tmp_path / "file" / "runs"), every_steps=1)
    error = f"NotADirectoryError: [Errno 20] Not a directory: '{tmp_path / 'file' / 'runs'}'"
    assert [text for text in caplog.messages if text.startswith("TensorBoard")] == [
        "TensorBoard is not accepting reports; up to 10000 reports are buffered until it does: "
        + error,
        f"TensorBoard did not receive {STEPS} reports of steps 1 to {STEPS}: {error}",
    ]


def test_a_full_queue_drops_reports_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    away = Away()
    delivery = Delivery(away, limit=4)
    with caplog.at_level(logging.WARNING):
        delivery.open(run=TrackedRun(job="", key="a"), step=1)
        for step in range(1, 10):
            delivery.put(Points(step=step, time_ns=0, values={"shoal/loss": step}))
        eventually(lambda: away.attempts > 0, "an attempt")
        away.back.set()
        eventually(lambda: "shoal/loss" in away.values, "the reports")
        delivery.end()
        delivery.wait(time.monotonic() + 60)
    assert losses(away) == [1, 2, 3]
    assert [text for text in caplog.messages if "lacks" in text] == [
        "Away lacks 6 reports of steps 4 to 9, which were dropped because the buffer already held "
        "4 reports"
    ]


class SlowCondition(threading.Condition):
    """A condition whose lock stays free for a while each time the main thread has released it. On a
    slow machine the wait may be too short to find a fault, but it cannot cause a failure."""

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if threading.get_ident() == threading.main_thread().ident:
            time.sleep(0.1)


def test_a_sink_is_closed_although_its_thread_runs_in_the_middle_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow would otherwise show a run that has ended as running."""
    slow = Slow()
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Condition", SlowCondition)
        delivery = Delivery(slow)
    delivery.open(run=TrackedRun(job="", key="a"), step=1)
    delivery.put(Points(step=1, time_ns=0, values={"shoal/loss": 1.0}))
    assert slow.writing.wait(60)
    threading.Timer(0.05, slow.go_on.set).start()
    delivery.end()
    delivery.wait(time.monotonic() + 60)
    assert (losses(slow), slow.closed) == ([1], [True])


def test_hanging_tracker_takes_less_than_a_millisecond_of_a_step() -> None:
    """The test measures processor time, because another process may interrupt the training thread.
    A call that waited for the sink would never return."""
    stuck = Stuck()
    model, optimizer, loader = begin(stuck, every_steps=1)
    followers = current_session().progress._followers
    spent: list[float] = []

    def measured(callback: Any) -> Any:
        def call(*arguments: Any) -> None:
            began = time.thread_time()
            callback(*arguments)
            spent.append(time.thread_time() - began)

        return call

    followers[:] = [(measured(begun), measured(committed)) for begun, committed in followers]
    for _ in loader.epochs(20):
        for (x,) in loader:
            model(x).square().mean().backward()
            assert optimizer.step()
            shoal.report(loss=loader.global_step)
            optimizer.zero_grad()
    assert stuck.opened == [1]
    assert len(spent) >= 2 * 20 * STEPS
    assert sorted(spent)[-3] < 1e-3
    stuck.ends.set()
    shoal.shutdown()
    assert losses(stuck) == list(range(1, 20 * STEPS + 1))


def test_joining_and_leaving_ranks_are_events() -> None:
    two, three = SessionValues(1, 2, 0), SessionValues(2, 3, 0, newcomers=1)
    assert changes(two, three, step=5, last=None) == [
        (EventKind.JOIN, "1 rank(s) joined"),
        (EventKind.GENERATION, "generation 2: 3 ranks, previously 2"),
    ]
    assert changes(three, SessionValues(3, 3, 1, newcomers=1), step=4, last=6) == [
        (EventKind.RETURN, "steps 4 to 6 are repeated"),
        (EventKind.FAULT, "a fault aborted 1 step(s), which were repeated"),
        (EventKind.JOIN, "1 rank(s) joined"),
        (EventKind.LEAVE, "1 rank(s) left"),
        (EventKind.GENERATION, "generation 3: 3 ranks, previously 3"),
    ]
    assert changes(three, three, step=6, last=None) == []


def test_tensorboard_reads_the_log_as_one_run(tmp_path: Path) -> None:
    train("after step()", shoal.TensorBoard(tmp_path), every_steps=1)
    assert points(tmp_path, "shoal/loss") == [(step, float(step)) for step in range(1, STEPS + 1)]


def test_tensorboards_files_cannot_be_at_a_url() -> None:
    with pytest.raises(ConfigurationError, match="TensorBoard: s3://bucket/logs: expected a dir"):
        shoal.TensorBoard("s3://bucket/logs")


def test_missing_tensorboard_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_missing(monkeypatch, "tensorboard")
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[tensorboard\]'"):
        shoal.TensorBoard(tmp_path)


def test_mlflow_has_one_run_per_key_however_often_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in mlruns.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    sink = shoal.MLflow(mlruns.EXPERIMENT)
    for step, key in enumerate("aba", start=1):
        sink.open(run=TrackedRun(job="train", key=key), step=step)
        sink.write([Points(step=step, time_ns=10**18, values={"shoal/loss": float(step)})])
        sink.close(ended=True)
    found = {run.data.tags["shoal.run"]: run for run in mlruns.runs(tmp_path)}
    assert {key: mlruns.points(tmp_path, run, "shoal/loss") for key, run in found.items()} == {
        "a": [(1, 1.0), (3, 3.0)],
        "b": [(2, 2.0)],
    }
    assert [run.info.status for run in found.values()] == ["FINISHED"] * 2
    assert len(mlruns.runs(tmp_path)) == 2


def test_single_process_run_has_a_key_and_no_job() -> None:
    memory = Memory()
    train("after step()", memory, every_steps=1)
    (run,) = memory.runs
    assert run.key
    assert not run.job


def test_missing_mlflow_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="expected the name of an experiment"):
        shoal.MLflow("")
    pretend_missing(monkeypatch, "mlflow")
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[mlflow\]'"):
        shoal.MLflow("digits")


def test_interval_in_steps_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"every_steps=0\): expected 1 or more"):
        begin(Memory(), every_steps=0)


def test_wandb_has_one_run_for_each_key_and_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank, or a resumed run, repeats step 2 and continues."""
    import wandb

    for name, value in wandbruns.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = TrackedRun(job="a job", key="key")
    for steps in ((1, 2), (2, 3)):
        sink = shoal.WandB("digits", config={"lr": 0.1})
        sink.open(run=run, step=steps[0])
        for step in steps:
            sink.write(
                [
                    Points(step=step, time_ns=0, values={"shoal/world_size": 2.0}),
                    Event(step=step, time_ns=0, kind=EventKind.JOIN, text="1 rank(s) joined"),
                ]
            )
            sink.write([Points(step=step, time_ns=0, values={"shoal/loss": step / steps[0]})])
        sink.close(ended=True)
    wandb.teardown()  # ends W&B's own process
    ((run_id, rows),) = wandbruns.rows(tmp_path).items()
    assert run_id.startswith("a-job-")
    assert wandbruns.points(rows, "shoal/loss") == [(1, 1.0), (2, 2.0), (3, 1.5)]
    for name in ("shoal/world_size", "shoal/join"):
        assert [step for step, _ in wandbruns.points(rows, name)] == [1, 2, 3]


def test_wandb_refuses_options_that_would_select_another_run() -> None:
    with pytest.raises(ConfigurationError, match="remove id"):
        shoal.WandB("digits", id="mine")
    with pytest.raises(ConfigurationError, match="expected the name of a project"):
        shoal.WandB("")


def test_missing_wandb_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_missing(monkeypatch, "wandb")
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[wandb\]'"):
        shoal.WandB("digits")


def test_missing_exporter_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.metric_exporter")
    pretend_missing(monkeypatch, "opentelemetry.exporter.otlp.proto.grpc")
    with pytest.raises(ConfigurationError, match=r"pip install 'shoal\[opentelemetry\]'"):
        shoal.OpenTelemetry()
