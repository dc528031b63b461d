"""A run whose script hangs on one rank names the line, and `shoal stacks` shows the calls."""

from __future__ import annotations

import json
import os
import re
import socket
import textwrap
import urllib.request
from typing import Any

import pytest

from tests.zygote.children import eventually

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
    import os, shoal, torch

    def wait_for_data():
        while not os.path.exists("data"): sum(range(10**5))

    net = torch.nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.randn(100, 3)), global_batch_size=10
    )
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if shoal.rank() == 1 and loader.global_step == 5:
            wait_for_data()
    shoal.print_once("ended at step", loader.global_step)
"""
LINE = 'script.py:5 in wait_for_data (while not os.path.exists("data"): sum(range(10**5)))'
"""A loop that uses processor time: without any, the rank would be evicted after a minute."""


def test_status_and_other_ranks_name_the_line_where_a_rank_hangs(
    shell: Shell,
) -> None:
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", shell.script(textwrap.dedent(TRAINING))
    )
    command.wait_for(lambda: "has stalled at step 5" in command.stderr, "the explanation")
    stalled = f"for rank 1 ({socket.gethostname()}), which is at {LINE}, with no progress"
    assert stalled in command.stderr
    shown = shell.run("status")[1]
    assert LINE in " ".join(shown.split())
    # in the diagnosis, the rank for which others wait comes first
    hung, waiting = (re.search(rf"^ranks? {rank} \(.*", shown, re.M) for rank in (1, 0))
    assert hung is not None
    assert waiting is not None
    assert hung.start() < waiting.start()
    assert ": waiting in allreduce; last completed: " in shown[waiting.start() :]
    assert "line 5 in wait_for_data" in " ".join(shown.split())
    record = shell.cluster()
    page = json.load(urllib.request.urlopen(f"http://{record.http}/api/job?job={record.job_id}"))
    assert "in wait_for_data" in page["members"][1]["stacks"]
    assert page["members"][1]["script_line"].startswith(LINE)

    status, both, err = shell.run("stacks")
    assert (status, err) == (0, "")
    found = r'rank 1 \(pid \d+ on \S+\):\n(?:  .*\n)*?.*script\.py", line 5 in wait_for_data\n'
    assert re.search(found, both), both
    assert re.search(r"rank 0 \(pid \d+ on \S+\):\n", both)
    assert "rank 0" not in shell.run("stacks", "1")[1]
    assert "thread 1" in shell.run("stacks", "1", "--all")[1]
    of_job = shell.run("stacks", record.job_id)[1]
    assert all(f"rank {rank} (pid " in of_job for rank in range(2)), of_job
    status, _, err = shell.run("stacks", "all", "--job", record.job_id)
    assert (status, "'all': expected a rank of job" in err) == (2, True), err
    status, _, err = shell.run("stacks", "7")
    assert status == 1
    assert "has no rank 7" in err

    (shell.directory / "data").touch()
    assert command.wait() == 0, command.stderr
    assert "ended at step 10" in command.stdout


ASYNCHRONOUS = """
    import shoal, time, torch

    def wait_for_data():
        open("data").read()

    net = torch.nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.01), strategy="async_sgd"
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.randn(100_000, 3)), batch_size=1
    )
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if shoal.rank() == 1 and loader.global_step == 5:
            wait_for_data()
"""


@pytest.mark.slow
def test_a_worker_that_hangs_while_others_train_on_is_named_with_its_line_and_stack(
    shell: Shell,
) -> None:
    os.mkfifo(shell.directory / "data")
    script = shell.script(textwrap.dedent(ASYNCHRONOUS))
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", script)
    command.wait_for(lambda: "trains on without" in command.stderr, "the explanation")
    hung = (
        f"trains on without rank 1 ({socket.gethostname()}), which is at script.py:5 in "
        'wait_for_data (open("data").read()), opening data, with no progress for '
    )
    assert hung in command.stderr
    shown = " ".join(shell.run("status")[1].split())
    assert hung in shown
    assert "line 5 in wait_for_data" in shown
    assert "the others are waiting for rank" not in command.stderr

    (shell.directory / "data").write_text("")
    eventually(
        lambda: "trains on without" not in shell.run("status")[1], "the end of the explanation"
    )
