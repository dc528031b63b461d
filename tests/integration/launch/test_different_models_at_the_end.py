"""`shoal run` fails if ranks have different models after the last step."""

from __future__ import annotations

import re
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
import sys, time, torch, shoal
from torch import nn

shoal.init()
torch.manual_seed(0)
net = nn.Linear(4, 4)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1), consistency_check_every=4
)
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch_size=8
)
for (rows,) in loader:
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[1] == "wrong" and shoal.rank() == 1 and loader.global_step == 6:
        net.weight.data.add_(1.0)
    if loader.global_step == 6:
        break
if sys.argv[1] == "alone" and shoal.rank() == 0:
    time.sleep(3)  # a long evaluation: the other rank has ended meanwhile
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
print("the script is over", flush=True)
"""


def test_ranks_that_end_with_different_models_fail_the_run_for_the_launcher_and_the_coordinator(
    shell: Shell, endpoint: str
) -> None:
    flags = ("run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint)
    status, out, err = shell.run(*flags, "--rdzv-id", "apart", shell.script(TRAINING), "wrong")
    assert (status, out.count("the script is over")) == (1, 2), err
    received = "had different values of the model; all agreed after step 4"
    assert re.search(
        rf"this worker failed: after step 6, the last one, rank \d .* {received}", err
    ), err
    # in the summary if the launcher heard of the worker first, otherwise as the reason why the job
    # ended
    assert any(received in line for line in err.splitlines() if not line.startswith("[")), err
    status, out, err = shell.run("status", "--coordinator", endpoint, "--job", "apart")
    assert "failed" in out, out + err
    assert received in out


@pytest.mark.parametrize("how", ["alone", "sound"])
def test_a_rank_that_changes_its_model_alone_after_the_loop_is_no_failure(
    shell: Shell, how: str
) -> None:
    status, out, err = shell.run(
        "run", "--standalone", "--nproc-per-node", "2", shell.script(TRAINING), how
    )
    assert (status, out.count("the script is over")) == (0, 2), err
