"""A replaced server that does not know of its replacement returns rows without the last steps. A
rank notices that they are stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shoal_worker.api as shoal
import torch
from shoal_common.tables.file import read_bucket
from shoal_worker.sparse_tables.step_tables import ServerStepTables
from torch.utils.data import DataLoader

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.ddp_tables import Recommender, loss_of, samples
from tests.integration.worker_async.test_async_backups import PRIMARY, Pair
from tests.relay import BACK, THERE, Relay
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]


class Trainer:
    """A ddp world of one rank in this process."""

    def __init__(self) -> None:
        self.net = Recommender()
        adam = torch.optim.Adam(self.net.parameters(), 1e-2)
        self.model, self.optimizer = shoal.as_distributed(self.net, adam, strategy="ddp")
        self._batches = iter(DataLoader(samples(), batch_size=16))

    @property
    def tables(self) -> ServerStepTables:
        found = self.net.users._source.tables  # type: ignore[attr-defined]
        assert isinstance(found, ServerStepTables)
        return found

    def step(self) -> None:
        loss_of(self.model, next(self._batches)).backward()
        assert self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def behind(cluster: Make) -> Iterator[Trainer]:
    """A trainer whose lookups go to a server that was replaced two steps ago. That server does not
    know of the replacement and answers for two more seconds. Pushes go to the new primary."""
    running = cluster(servers=1, backups=1, lease_ms=1_000)
    pair = Pair(running)
    with Relay(running.coordinator.address) as first, Relay(running.coordinator.address) as second:
        ways = dict(zip(running.servers, (first, second), strict=True))
        for server, way in ways.items():
            server.process.kill()
            server.process.wait()
            server.start(coordinator=way.address)
        with running.member():
            trainer = Trainer()
            trainer.step()
            pair.wait_in_sync()
            before, replaced = pair.status(PRIMARY), pair.process(PRIMARY)
            ways[replaced].hold([THERE, BACK])
            pair.wait_replaced(before)
            servers = trainer.tables._servers
            assert servers is not None
            (link,) = servers._links

            def found() -> bool:
                link._server.find()  # as after any failed call
                return link.address != replaced.address

            eventually(found, "the new primary's address")
            trainer.step()
            assert {each.version for each in replaced.look().partitions} == {2}
            yield trainer


def test_looked_up_rows_come_from_the_server_that_owns_the_place(
    behind: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        behind.net.users(torch.arange(40))
    assert behind.tables._reader is not None
    assert {each.version for each in behind.tables._reader.look().values()} == {3}
    assert "has lost data" not in caplog.text
    behind.step()


def test_saved_rows_come_from_the_server_that_owns_the_place(
    behind: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shoal.save_checkpoint(tmp_path / "saved")
    behind.step()
    shoal.save_checkpoint(tmp_path / "saved")  # waits for the previous lookup
    files = sorted((tmp_path / "saved" / "step-2").glob("rows-*"))
    assert [read_bucket(memoryview(file.read_bytes())).version for file in files] == [3] * 5
    assert "has lost data" not in caplog.text
