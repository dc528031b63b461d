"""A worker whose metrics port is in use trains without metrics, and logs how to get them."""

from __future__ import annotations

import socket
from typing import Any

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
import shoal, torch
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(model, torch.optim.SGD(model.parameters(), 0.01))
loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(8, 4)), global_batch_size=4)
for _ in loader.epochs(1):
    for (rows,) in loader:
        model(rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained", flush=True)
"""


def test_worker_with_a_taken_metrics_port_trains_and_reports_it_in_one_line(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = shell.start(
            "run", "--standalone", shell.script(TRAINING), SHOAL_METRICS_LISTEN=listen
        )
        assert command.wait() == 0, command.stderr
    (line,) = (line for line in command.stderr.splitlines() if listen in line)
    assert f"this worker serves no metrics: cannot listen on {listen}" in line
    assert "set SHOAL_METRICS_LISTEN to a free port" in line
    assert "Traceback" not in command.stderr
    assert "trained" in command.stdout
