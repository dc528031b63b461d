"""An evicted worker is not the result of the run: it exits with a status of its own, so that its
launcher replaces it."""

import signal
from pathlib import Path

from shoal_common.exit_status import EVICTED

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually

SWALLOWS = """
import os, time
import shoal, torch
from torch import nn

shoal.init()
net = nn.Linear(4, 2)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
loader = shoal.ElasticDataLoader(data, global_batch_size=4)
try:
    for _ in loader.epochs(100_000):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)  # else it would take a processor until it is evicted
except Exception as error:
    print("swallowed", type(error).__name__, flush=True)
print("the end of the script", flush=True)
"""


def test_worker_that_stalled_past_its_lease_exits_as_evicted_with_one_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(zygote, tmp_path, EPOCHS="2", MICRO="1", max_workers=2, lease_ms=3000) as running:
        with running.held():
            running.start(0)
            running.start(1)
            running.wait_steps(1)
            running.signal(1, signal.SIGSTOP)
            stopped = running.members[1]
            eventually(
                lambda: all(member.member_id != stopped for member in running.job().members),
                "its lease to end",
            )
            running.signal(1, signal.SIGCONT)
            assert running.workers[1].wait() == EVICTED
        running.finish(0)
        said = running.workers[1].said()
        assert "Traceback" not in said, said
        (line,) = [line for line in said.splitlines() if line.startswith("shoal: ")]
        assert "evicted from job 'job'" in line
        assert "for its launcher to restart it" in line


def test_script_that_swallows_its_own_eviction_does_not_end_well(
    zygote: Zygote, tmp_path: Path
) -> None:
    script = tmp_path / "swallows.py"
    script.write_text(SWALLOWS)
    with cluster(zygote, tmp_path, max_workers=1, lease_ms=3000, script=script) as running:
        running.start(0)
        running.wait_steps(5)
        # like a launcher that wrongly considers its worker ended
        running.client.report_exit("job", running.members[0], exit_code=1)
        assert running.workers[0].wait() == EVICTED
        assert "the end of the script" in running.workers[0].said()
