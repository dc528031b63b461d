"""Runs that have ended, of clusters that are gone: `shoal history`, and `status`, `events` and
`logs` of a past run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.browser import MISSING, Browser
from tests.integration.coordinator.harness import eventually

Shell = Any  # of tests/integration/conftest.py
Command = Any

SCRIPT = """
import sys, time
import shoal, torch
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.01))
data = TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
loader = shoal.ElasticDataLoader(data, global_batch_size=10)
for epoch in loader.epochs(int(sys.argv[1])):
    for x, y in loader:
        if sys.argv[2:] == ["hang"] and shoal.rank() == 1 and loader.global_step == 15:
            print("hangs", flush=True)
            time.sleep(600)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        shoal.report(loss=loss, accuracy=0.5)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} is over", flush=True)
    if sys.argv[2:] == ["fail"]:
        raise ValueError("no such luck")
"""
EPOCHS, STEPS = 20, 10  # of an epoch


@pytest.fixture(scope="module")
def ended(shared_shell: Shell) -> Shell:
    """Two runs that have ended: `good`, in which a worker was killed, and `bad`, whose script
    raised an exception."""
    script = shared_shell.script(SCRIPT)
    flags = ("run", "--standalone", "--nproc-per-node", "2", "--rdzv-id")
    command = shared_shell.start(*flags, "good", script, str(EPOCHS), "hang")
    command.wait_for_output("[1]: hangs")
    os.kill(shared_shell.pids()[1], signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    status, _, err = shared_shell.run(*flags, "bad", script, "3", "fail")
    assert status == 1, err
    return shared_shell


def received(shell: Shell, *arguments: str) -> str:
    status, out, err = shell.run(*arguments, COLUMNS="120")
    assert status == 0, err
    return out


def test_runs_are_listed_with_their_outcome(ended: Shell) -> None:
    lines = [line.split() for line in received(ended, "history").splitlines()]
    names = "run began took strategy ranks step faults outcome arguments"
    assert lines[0] == names.split()
    (bad, good) = lines[1:]
    assert (bad[0], bad[-3:]) == ("bad/1", ["failed", "3", "fail"])
    assert (good[0], good[4:]) == (
        "good/1",
        ["ddp", "2", f"{EPOCHS * STEPS:,}", "1", "completed", str(EPOCHS), "hang"],
    )
    listed = json.loads(received(ended, "history", "--json", "--job", "good"))
    assert [each["run"] for each in listed] == ["good/1"]
    assert listed[0]["end"]["metrics"] == {"accuracy": 0.5}


def test_status_of_a_finished_run_shows_its_figures_and_workers(ended: Shell) -> None:
    for arguments in (
        ("history", "good"),
        ("status", "--run", "good/1"),
        ("status", "--job", "good"),
    ):
        out = received(ended, *arguments)
        assert re.match(r"run good/1  completed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, .* ago", out)
        assert f"{EPOCHS * STEPS:,} steps, {EPOCHS * 100:,} samples in " in out
        assert "ended with SIGKILL: training paused for " in out
        assert re.search(r"^ +0 .* exit code 0 *$", out, re.MULTILINE)
        assert re.search(r"^ +1 .* SIGKILL(, replaced)? *$", out, re.MULTILINE)
    out = received(ended, "status")
    assert out.startswith("run bad/1  failed at ")
    assert "exit code 1: ValueError: no such luck" in out
    status = json.loads(received(ended, "status", "--json"))
    assert (status["job_id"], status["phase"], status["ending"]) == ("bad", "finished", "failed")


def test_events_and_output_of_a_finished_run_are_kept(ended: Shell) -> None:
    status, out, err = ended.run("events", "--run", "good")
    assert status == 0, err
    assert err.startswith("shoal: run good/1 has ended: completed at ")
    assert {"job_created", "generation_formed", "member_lost", "job_finished"} <= {
        line.split()[1] for line in out.splitlines()
    }
    kinds = [json.loads(line)["kind"] for line in received(ended, "events", "--json").splitlines()]
    assert "job_failed" in kinds
    status, out, err = ended.run("logs", "--run", "good", "--rank", "0")
    assert (status, err.splitlines()[0][:24]) == (0, "shoal: run good/1 has en")
    assert [line for line in out.splitlines() if "epoch" in line] == [
        f"[0]: epoch {epoch} is over" for epoch in range(EPOCHS)
    ]
    assert "ValueError: no such luck" in received(ended, "logs")


def test_finished_run_can_be_plotted(ended: Shell) -> None:
    file = ended.directory / "course.svg"
    received(ended, "history", "good", "--plot", str(file))
    marks = {each.get("id") for each in ElementTree.parse(file).iter() if each.get("id")}
    assert "fault-1" in marks
    status, _, err = ended.run("history", "--plot", str(file))
    assert (status, "requires RUN" in err) == (2, True)


def test_two_runs_are_compared(ended: Shell) -> None:
    rows = [
        re.split(r"\s{2,}", line.strip())
        for line in received(ended, "history", "good", "bad").splitlines()
    ]
    found = {row[0]: row[1:] for row in rows}
    assert found["result"][:2] == ["good/1", "bad/1"]
    assert found["outcome"] == ["completed", "failed"]
    assert found["steps"][0] == f"{EPOCHS * STEPS:,}"
    assert found["arguments"] == [f"{EPOCHS} hang", "3 fail"]
    assert "strategy" not in found
    assert "arguments" in json.loads(received(ended, "history", "good", "bad", "--json"))["differs"]


def test_unknown_and_unreadable_runs_are_reported_in_one_line_each(
    ended: Shell,
) -> None:
    status, out, err = ended.run("history", "never/2")
    assert (status, out) == (1, "")
    assert err == (
        "shoal: the history has no run 'never/2': `shoal history` lists the recorded runs "
        "[HISTORY_UNKNOWN]\n"
    )
    broken = ended.directory / "state" / "shoal" / "jobs" / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    status, out, err = ended.run("history")
    assert (status, len(out.splitlines())) == (0, 3)
    assert re.fullmatch(rf"shoal: cannot read the run recorded in {broken}: .*\n", err)


def test_the_status_page_of_a_run_of_a_few_steps_has_its_losses(ended: Shell) -> None:
    page = re.search(r"in a browser: file://(\S+)", received(ended, "status", "--run", "bad"))
    assert page is not None
    saved = re.search(r'id="saved">(.*?)</script>', Path(page[1]).read_text(), re.DOTALL)
    assert saved is not None
    points = json.loads(saved[1])["/api/job"]["history"]
    assert any(loss is not None for _, _, loss, _, _ in points), points
    assert points[-1][1] == STEPS
    assert len(points) > 1


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_the_status_page_of_a_finished_run_opens_from_disk(ended: Shell, tmp_path: Path) -> None:
    page = re.search(r"in a browser: (file:\S+)", received(ended, "status", "--run", "good"))
    assert page is not None
    with Browser(tmp_path) as browser:
        browser.open(page[1])
        eventually(lambda: browser.texts("h1") == ["good"], "the page to show the run")
        assert browser.texts("#link") == ["finished run, from disk"]
        facts = browser.texts("#summary dl.facts > div")
        assert any(f"{EPOCHS * STEPS:,}" in fact for fact in facts), facts
        assert any("member lost" in row for row in browser.texts("#event-rows tr"))
        assert browser.complaints() == []


def test_stopped_and_killed_runs_are_kept_too(shell: Shell, elastic_worker: Path) -> None:
    flags = ("run", "--standalone", "--nproc-per-node", "1", "--rdzv-id")
    command = shell.start(*flags, "stopped", elastic_worker, shell.directory / "finish")
    command.wait_for_output("[0]: generation 1")
    assert json.loads(received(shell, "history", "--json"))[0]["outcome"] == "running"
    received(shell, "stop", "--reason", "enough for today")
    assert command.wait() == 0, command.stderr
    command = shell.start(*flags, "killed", elastic_worker, shell.directory / "finish")
    command.wait_for_output("[0]: generation 1")
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait()
    command.wait_until_gone()
    runs = {each["run"]: each for each in json.loads(received(shell, "history", "--json"))}
    assert {name: run["outcome"] for name, run in runs.items()} == {
        "stopped/1": "stopped",
        "killed/1": "killed",
    }
    assert runs["stopped/1"]["end"]["reason"] == "enough for today"
    assert "generation 1" in received(shell, "logs", "--run", "killed")
    status, _, err = shell.run("events", "--run", "killed")
    assert (status, "its launcher was killed" in err) == (1, True)


def test_runs_beyond_the_limit_are_removed_when_another_starts(shell: Shell) -> None:
    script = shell.script("print('hello')")
    for number in range(3):
        assert (
            shell.run("run", "--rdzv-id", f"job-{number}", script, SHOAL_HISTORY_RUNS="1")[0] == 0
        )
    runs = json.loads(received(shell, "history", "--json"))
    assert [each["run"] for each in runs] == ["job-2/1", "job-1/1"], (
        "one that has ended before the last one began"
    )
    assert received(shell, "logs") == "[0]: hello\n"
    status, _, err = shell.run("run", script, SHOAL_HISTORY_RUNS="many")
    assert status == 2
    assert "SHOAL_HISTORY_RUNS='many': expected a whole number" in err


def test_a_submitted_run_is_in_the_history_and_its_output_is_written_once(shell: Shell) -> None:
    script = shell.script("print('hello')")
    assert shell.run("submit", "--job", "away", script)[0] == 0
    ended = lambda: '"ok": true' in shell.run("jobs", "--json")[1]  # noqa: E731
    eventually(ended, "the submitted run to end")
    runs = json.loads(received(shell, "history", "--json"))
    assert [(each["run"], each["outcome"]) for each in runs] == [("away/1", "completed")]
    assert received(shell, "logs").count("[0]: hello") == 1
    assert received(shell, "logs", "--run", "away/1").count("[0]: hello") == 1
