"""An asynchronous job whose parameter servers never start reports this, and stops immediately when
asked."""

from __future__ import annotations

import json
import signal
import textwrap
import time
from typing import Any
from urllib.request import urlopen

from shoal_common.exit_status import EVICTED

from tests.integration.launch.conftest import Coordinator

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
    import torch, shoal

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(
        model, torch.optim.SGD(model.parameters(), 0.1), strategy="async_sgd"
    )
    print("trains", flush=True)
"""
MISSING = (
    "training cannot begin: 2 of 2 parameter servers have not registered; start each with "
    "`shoal-ps-server --job lonely"
)


def test_launcher_and_status_name_missing_servers_and_sigterm_ends_the_job_at_once(
    shell: Shell, coordinator: Coordinator
) -> None:
    endpoint = coordinator.address
    flags = (
        "run",
        "--nnodes",
        "1",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "lonely",
        "--servers",
        "2",
    )
    command = shell.start(*flags, shell.script(textwrap.dedent(TRAINING)))
    command.wait_for(
        lambda: f"shoal: job lonely: {MISSING}" in command.stderr, "the launcher's word"
    )
    command.wait_for(
        lambda: "waiting for the job's parameter servers for 1" in command.stderr, "rank 0's word"
    )
    status, out, err = shell.run("status", "--coordinator", endpoint, "--job", "lonely")
    assert status == 0, err
    assert MISSING in " ".join(out.split())
    with urlopen(f"http://{coordinator.http_address}/api/job?job=lonely", timeout=60) as page:
        assert json.load(page)["waits_for"].startswith(MISSING)
    told_at = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() in (EVICTED, 128 + signal.SIGTERM), command.stderr
    assert time.monotonic() < told_at + 10  # usually a second or two
    assert "Traceback" not in command.stderr
    assert "trains" not in command.stdout
