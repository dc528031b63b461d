"""Workers that are asked to leave, or interrupted, while they wait for others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shoal_worker.elastic.session.session import Session

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.zygote.children import PATIENCE_S, eventually

Make = Callable[..., AsyncCluster]
TRAIN = (
    "import sys; from tests.integration.worker_async.train import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def test_a_worker_that_waits_for_the_first_values_leaves_on_sigterm(
    session: Session, running: AsyncCluster
) -> None:
    """This process is rank 0, which should send the first values and does not."""
    worker = running.start_worker()
    eventually(
        lambda: all(server.look().HasField("optimizer") for server in running.servers),
        "the worker to have come to its start",
    )
    worker.process.kill(signal.SIGTERM)
    assert worker.process.wait() == 0


def test_interrupted_script_does_not_wait_for_prefetched_values(
    cluster: Make, tmp_path: Path
) -> None:
    """The values are being pulled from a server that is stopped. The script runs in its own
    interpreter, because the test checks how the interpreter exits."""
    running = cluster(servers=1)
    server = running.servers[0]
    server.process.kill()
    server.process.wait()
    server.start(SHOAL_FAILPOINTS="pull.halfway@6=stop")
    directory = tmp_path / "script"
    directory.mkdir()
    configuration = json.dumps(
        {"directory": str(directory), "options": {"prefetch": True}, "delay_s": 0.1}
    )
    where = {
        "PYTHONFAULTHANDLER": "1",
        "SHOAL_COORDINATOR": running.coordinator.address,
        "SHOAL_JOB_ID": running.job_id,
        "SHOAL_MEMBER_ID": "member-of-its-own",
    }
    with (directory / "log").open("w") as log:
        script = subprocess.Popen(
            [sys.executable, "-c", TRAIN, configuration],
            env=os.environ | where,
            stdout=log,
            stderr=log,
        )
    try:
        status = Path(f"/proc/{server.process.pid}/stat")
        eventually(
            lambda: status.read_text().rpartition(")")[2].split()[0] == "T",
            "the server to stand still",
        )
        script.send_signal(signal.SIGINT)
        try:
            ended = script.wait(PATIENCE_S / 4)
        except subprocess.TimeoutExpired:
            script.send_signal(signal.SIGABRT)  # prints the stack of each of its threads
            ended = script.wait()
        assert ended == -signal.SIGINT, (directory / "log").read_text()
    finally:
        script.kill()
        script.wait()
