"""A rank that slows the others down is named in the places where users look."""

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually

SCRIPT = """
import os
import time
import shoal, torch
from torch import nn

shoal.init()
net = nn.Linear(4, 2)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
loader = shoal.ElasticDataLoader(data, global_batch_size=4)
for _ in loader.epochs(100_000):
    for x, y in loader:
        time.sleep(0.3 * int(os.environ["SHOAL_LOCAL_INDEX"]))  # the slower processor
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


BY_SPEED = """
import os
import time
import shoal, torch
from torch import nn

shoal.init()
net = nn.Linear(4, 2)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1), strategy=os.environ["STRATEGY"]
)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.zeros(240, dtype=torch.long))
loader = shoal.ElasticDataLoader(data, global_batch_size=24, micro_batch_size=2, balance=True)
slow = 5 if os.environ["SHOAL_LOCAL_INDEX"] == "2" else 1
for _ in loader.epochs(100_000):
    for step in loader.steps():
        for x, y in step:
            time.sleep(0.02 * slow)
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("local_sgd", marks=pytest.mark.slow)])
def test_a_slow_rank_gets_fewer_micro_batches_before_and_after_a_death(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    script = tmp_path / "by_speed.py"
    script.write_text(BY_SPEED)
    with cluster(zygote, tmp_path, max_workers=3, script=script, STRATEGY=strategy) as running:
        for index in range(3):
            running.start(index)

        def share_with(ranks: int) -> float | None:
            members = [member for member in running.job().members if member.rank is not None]
            slow = [member for member in members if member.member_id == running.members[2]]
            return slow[0].progress.share if slow and len(members) == ranks else None

        assert eventually(lambda: share_with(3), "micro-batches dealt by speed") <= 0.5
        running.workers[0].kill()
        assert eventually(lambda: share_with(2), "micro-batches dealt by speed again") <= 0.7


def test_rank_that_works_longer_than_the_others_is_named_in_status_logs_and_an_event(
    zygote: Zygote, tmp_path: Path
) -> None:
    script = tmp_path / "slower.py"
    script.write_text(SCRIPT)
    with cluster(zygote, tmp_path, max_workers=2, script=script) as running:
        running.start(0)
        running.start(1)
        note = eventually(
            lambda: next((m.note for m in running.job().members if m.note), None),
            "a note in the status",
        )
        slow = next(m for m in running.job().members if m.member_id == running.members[1])
        assert note.startswith(
            f"the others are waiting for rank {slow.rank} ({slow.host}): it works"
        )
        eventually(
            lambda: "the others are waiting for rank" in running.workers[0].said(),
            "a line of the rank that waits",
        )
        events = [
            event for event in running.client.watch_events("job") if event.kind == "straggler_found"
        ]
        assert {event.member_id for event in events} == {running.members[1]}
