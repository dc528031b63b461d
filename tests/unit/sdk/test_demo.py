"""The parts of the demo that a run does not check itself."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rich.console import Console
from shoal.demo import digits, stage
from shoal.demo.director import plans
from shoal.demo.report import _pauses
from shoal.demo.screen import Screen
from shoal.demo.stage import Outcome
from shoal.demo.trace import CommittedStep, Trace
from shoal.demo.train import Drag
from shoal_common.errors import DeadlineError
from shoal_protos.v1 import coordinator_pb2 as pb


def step(member: str, number: int, at_s: float, loss: float) -> CommittedStep:
    return CommittedStep(
        unix_s=at_s,
        member=member,
        rank=0,
        generation=1,
        step=number,
        loss=loss,
        samples=1,
        staleness=0.0,
    )


def test_the_digits_are_scikit_learns_each_in_one_of_the_sets() -> None:
    # imported here because only this test needs it, and it takes a second
    from sklearn.datasets import load_digits

    train, test = digits.datasets()
    assert (len(train), len(test)) == (1437, 360)
    images, labels = (torch.cat([train.tensors[i], test.tensors[i]]) for i in (0, 1))
    known = load_digits()
    shown = torch.cat([images.flatten(1) * 16, labels[:, None]], 1).int().tolist()
    assert sorted(shown) == sorted(
        [*pixels, label]
        for pixels, label in zip(known.data.astype(int).tolist(), known.target, strict=True)
    )


def test_synchronous_step_is_one_point_of_the_curve_and_pushes_are_one_each() -> None:
    trace = Trace(
        steps=(step("fast", 1, 10.0, 4.0), step("fast", 2, 11.0, 2.0), step("slow", 1, 12.0, 1.0)),
        accuracies=(),
    )
    assert trace.loss_curve(common_steps=True) == ([0.0, 1.0], [2.5, 2.0])
    assert trace.loss_curve(common_steps=False) == ([0.0, 1.0, 2.0], [4.0, 2.0, 1.0])


def test_slowed_down_iteration_takes_a_multiple_of_its_fastest_time() -> None:
    drag = Drag(4)
    for _ in range(2):
        drag.begin()
        began_s = time.perf_counter()
        time.sleep(0.01)  # not a wait: the work of the iteration
        drag.hold()
        drag.end()
    assert time.perf_counter() - began_s >= 0.04


def test_last_table_stays_until_the_processes_have_ended(tmp_path: Path) -> None:
    plan = plans(sync_epochs=1, async_epochs=1)[0]
    outcome = Outcome(plan=plan, directory=tmp_path)
    ranked = pb.MemberStatus(
        rank=0,
        pid=4711,
        phase=pb.MEMBER_PHASE_RANKED,
        progress=pb.Progress(step=plan.total_steps - 3, loss=0.5),
    )
    written = io.StringIO()
    with Screen(Console(file=written, force_terminal=True, width=120)) as screen:
        screen.show(plan, pb.GetJobResponse(phase=pb.JOB_PHASE_RUNNING, members=[ranked]), outcome)
        written.truncate(0)
        for after in (pb.GetJobResponse(phase=pb.JOB_PHASE_FINISHED), None):
            screen.show(plan, after, outcome)
    assert "4711" in written.getvalue()
    assert "starting processes" not in written.getvalue()


@pytest.mark.parametrize(
    "plan", plans(sync_epochs=2, async_epochs=3), ids=lambda plan: plan.strategy
)
def test_progress_is_measured_in_steps_of_complete_epochs(plan) -> None:
    assert plan.total_steps == {"ddp": 2 * 15, "async_sgd": 3 * 45}[plan.strategy]


def test_pause_for_a_server_is_the_longest_gap_between_steps_after_its_kill(
    tmp_path: Path,
) -> None:
    plan = plans(sync_epochs=1, async_epochs=1)[1]
    outcome = Outcome(
        plan=plan, directory=tmp_path, killed_unix_s=100.0, killed="a parameter server"
    )
    steps = [
        step("a", number, at_s, 1.0)
        for number, at_s in enumerate((90.0, 98.0, 99.9, 100.1, 104.1, 104.2, 119.0, 500.0))
    ]
    pause, joined = _pauses(outcome, steps[:6])
    assert pause == pytest.approx(4.0)
    assert joined is None


def test_a_run_is_stopped_for_lack_of_progress_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plans(sync_epochs=1, async_epochs=1)[0], patience=timedelta(seconds=1))
    steps = iter(range(1, 10))  # one step per look, for longer than the patience

    def progressing(client: object, cluster: object) -> pb.GetJobResponse:
        return pb.GetJobResponse(
            members=[pb.MemberStatus(progress=pb.Progress(step=next(steps, 9)))]
        )

    monkeypatch.setattr(
        stage,
        "_command",
        lambda plan, records: [sys.executable, "-c", "import time; time.sleep(60)"],
    )
    monkeypatch.setattr(stage, "_job", progressing)
    with pytest.raises(
        DeadlineError,
        match=f"made no progress for 1 s after step 9 of {plan.total_steps}; its output is in ",
    ):
        stage.perform(plan, tmp_path, lambda plan, job, outcome: None)
