"""The figures that `shoal run` prints about a real run whose worker is killed, and the progress bar
on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

SCRIPT = """
import sys, time
import shoal, torch
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model, optimizer = torch.nn.Linear(4, 1), None
model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.01))
loader = shoal.ElasticDataLoader(
    TensorDataset(torch.randn(100, 4), torch.randn(100, 1)), global_batch_size=12
)
for epoch in loader.epochs(int(sys.argv[1])):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        shoal.report(loss=loss, accuracy=0.5)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)  # so that there is a run to look at
    print(f"epoch {epoch} is over", flush=True)
"""
STEPS, SAMPLES = 9, 100  # of an epoch


def test_killed_worker_appears_with_its_pause_in_the_report_the_figures_and_the_plot(
    shell: Shell, tmp_path: Path
) -> None:
    plot, epochs = tmp_path / "course.svg", 30
    flags = ("run", "--standalone", "--nproc-per-node", "2", "--plot", plot)
    command = shell.start(*flags, shell.script(SCRIPT), str(epochs))
    command.wait_for_output("[1]: epoch 3 is over")
    victim = shell.pids()[1]
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 0, command.stderr
    received = re.search(
        rf"^shoal: rank 1 \(pid {victim} on \S+\) ended with SIGKILL: training paused for "
        rf"(\d+\.\d{{3}}) s and continued from step "
        r"(\d+) with 1 rank$",
        command.stderr,
        re.MULTILINE,
    )
    assert received is not None, command.stderr
    assert 4 * STEPS <= int(received[2]) < epochs * STEPS
    assert 0 < float(received[1]) < 30
    figures = re.search(
        rf"^shoal: {epochs * STEPS} steps, {epochs * SAMPLES:,} samples in .*; loss \d",
        command.stderr,
        re.MULTILINE,
    )
    assert figures is not None, command.stderr
    faults = re.search(
        r"^shoal: 1 fault, \d joins?, 0 leaves: \d pauses?, .* s in all, (\S+) s the longest",
        command.stderr,
        re.MULTILINE,
    )
    assert faults is not None, command.stderr
    assert float(faults[1]) >= float(received[1])
    assert "\x1b" not in command.stderr
    assert "\r" not in command.stderr
    marks = {element.get("id") for element in ElementTree.parse(plot).iter() if element.get("id")}
    assert "fault-1" in marks
    assert "fault-2" not in marks
    assert ">accuracy</text>" in plot.read_text(), "what the script reports is in the picture too"


def test_impossible_plot_is_refused_before_the_run(shell: Shell, tmp_path: Path) -> None:
    script = shell.script("print('ran')")
    for file, wrong in (
        (tmp_path / "course.pdf", ".png or .svg"),
        (tmp_path / "none" / "course.png", "does not exist; create it first"),
    ):
        status, out, err = shell.run("run", "--standalone", "--plot", file, script)
        assert (status != 0, out) == (True, "")
        assert wrong in err


@pytest.mark.slow
@pytest.mark.fresh
def test_figures_are_reported_after_a_failure_too(shell: Shell) -> None:
    script = shell.script(SCRIPT + "\nraise ValueError('at the end')\n")
    status, _, err = shell.run("run", "--standalone", script, "2")
    assert status != 0
    assert f"shoal: {2 * STEPS} steps, {2 * SAMPLES} samples" in err
    assert err.index("samples in") < err.index("First failure")


STREAM = """
import shoal, torch

class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(20)

model = torch.nn.Linear(1, 1)
model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 1e-6))
loader = shoal.ElasticDataLoader(Numbers(), global_batch_size=1)
for _ in loader.epochs(2):
    for x in loader:
        model(x.float().view(-1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.matrix
def test_remaining_steps_of_a_stream_are_unknown(shell: Shell) -> None:
    status, _, err = shell.run("run", "--standalone", "--nproc-per-node", "2", shell.script(STREAM))
    assert status == 0, err
    assert "shoal: 40 steps, 40 samples in " in err
    assert " left" not in err


def on_terminal(shell: Shell, *arguments: str | Path) -> str:
    """Runs `shoal` on a terminal of 100 columns and returns what it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", *map(str, arguments)],
        env=shell.environment,
        cwd=shell.directory,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 1 << 16):
            written += data
    except OSError:  # the other end has been closed
        pass
    finally:
        os.close(ours)
        assert process.wait(60) == 0
    return written.decode()


@pytest.mark.slow
def test_progress_bar_leaves_the_workers_lines_intact_and_can_be_disabled(
    shell: Shell,
) -> None:
    script = shell.script(SCRIPT)
    written = on_terminal(shell, "run", "--standalone", "--nproc-per-node", "2", script, "12")
    assert re.search(
        rf"step \d+ of {12 * STEPS} \(\d+%\), 0:00:0\d left, [\d,]+ samples/s, loss ", written
    )
    lines = [line.rpartition("\x1b[2K")[2] for line in written.split("\r\n")]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    for rank in range(2):
        assert [line for line in plain if line.startswith(f"[{rank}]: epoch")] == [
            f"[{rank}]: epoch {e} is over" for e in range(12)
        ]
    assert any(
        line.startswith(f"shoal: {12 * STEPS} steps, {12 * SAMPLES:,} samples") for line in plain
    )
    assert not any("left" in line for line in plain)  # the bar has been erased
    quiet = on_terminal(
        shell, "run", "--standalone", "--nproc-per-node", "1", "--no-progress", script, "2"
    )
    assert " left" not in quiet
    assert "\x1b[2K" not in quiet


ASYNCHRONOUS = """
import os, signal, time
import shoal, torch
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
options = {{options}}
model, optimizer = shoal.as_distributed(
    model, torch.optim.SGD(model.parameters(), 2.0**-8), strategy="async_sgd", **options
)
loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(640, 4)), batch_size=4)
taken = 0
for _ in loader.epochs(1):
    for (rows,) in loader:
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()
        taken += 1
        time.sleep(0.01)
        if (
            taken == {{dies_after}}
            and os.environ["LOCAL_RANK"] == "1"
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_asynchronous(shell: Shell, options: str, dies_after: int) -> str:
    """Runs two asynchronous workers, one of which is killed; returns the launcher's output."""
    script = shell.script(
        ASYNCHRONOUS.replace("{{options}}", options).replace("{{dies_after}}", str(dies_after))
    )
    status, _, err = shell.run(
        "run", "--standalone", "--nproc-per-node", "2", "--servers", "1", script
    )
    assert status == 0, err
    assert "ended with SIGKILL" in err
    said: str = err
    return said


def test_a_batch_that_a_killed_worker_had_pushed_counts_once_in_the_figures(shell: Shell) -> None:
    err = run_asynchronous(shell, "{}", 20)
    assert re.search(r"^shoal: 160 steps, 640 samples in ", err, re.MULTILINE), err


@pytest.mark.parametrize("dies_after", [18, 20])
def test_inner_steps_that_a_killed_worker_had_not_pushed_count_once_in_the_figures(
    shell: Shell, dies_after: int
) -> None:
    """A round has eight steps, whose batches are dealt again."""
    options = "{'inner_steps': 8, 'outer_optimizer': torch.optim.SGD(model.parameters(), 1.0)}"
    err = run_asynchronous(shell, options, dies_after)
    assert re.search(r"^shoal: 160 steps, 640 samples in ", err, re.MULTILINE), err
