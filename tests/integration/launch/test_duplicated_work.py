"""`shoal run` of a script that trains with torch's DataLoader and saves on every rank."""

from __future__ import annotations

from typing import Any

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
import sys, torch, shoal
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dataset = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
torch.manual_seed(0)
net = nn.Linear(4, 4)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
sampler = DistributedSampler(dataset, shoal.world_size(), shoal.rank())
open(f"log-{shoal.rank()}.csv", "w").close()
for epoch in range(2):
    for (rows,) in DataLoader(dataset, batch_size=8, sampler=sampler):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = sum(model(rows).square().sum().item() for (rows,) in DataLoader(dataset, 16))
    if shoal.rank() == 0:
        open("loss.csv", "w").write(str(loss))
    open("all.log", "a").write(str(loss))
if sys.argv[1] == "left":
    shoal.shutdown()
    assert shoal.world_size() == 2
    shoal.rank() == 0 and torch.save(net.state_dict(), "model.pt")
elif sys.argv[1] == "torch.save":
    torch.save(net.state_dict(), "model.pt")
else:
    open("model.json", "w").write(str(net.state_dict()))
"""


def test_ranks_that_evaluate_the_same_batches_and_write_one_file_are_warned_once(
    shell: Shell,
) -> None:
    script = shell.script(TRAINING)
    for how, written in (("torch.save", "model.pt"), ("open", "model.json"), ("left", None)):
        status, _, err = shell.run("run", "--standalone", "--nproc-per-node", "2", script, how)
        assert status == 0, err
        assert err.count("evaluated the model on the same batches") == 1, err
        assert err.count("ranks 0 and 1 both wrote") == (written is not None), err
        if written is not None:
            assert f"{written} after step 8, so each overwrites" in err, err


FIRST = """
import shoal
with shoal.main_first() as first:
    print("first" if first else "not first", flush=True)
"""


def test_main_first_is_true_for_one_worker_of_each_standalone_run(
    shell: Shell,
) -> None:
    script = shell.script(FIRST)
    for _ in range(2):
        status, out, err = shell.run("run", "--standalone", "--nproc-per-node", "3", script)
        assert status == 0, err
        assert (out.count("first"), out.count("not first")) == (3, 2), out
