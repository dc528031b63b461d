"""Sharded streams, elastic: a worker is killed within a shard or an evaluation, and the results do
not change."""

import re
import signal
from pathlib import Path

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually

RESULTS = re.compile(r"(parameters \w+|\d+ of \d+ correct)$", re.MULTILINE)
STEPS = 38
ITEMS = 1797

pytestmark = pytest.mark.slow


def script(directory: Path, kind: str, pause: float, workers: int) -> Path:
    """Runs the example with its command line, because the worker's program takes no arguments."""
    example = Path(__file__).parents[3] / "examples" / "tar_shards.py"
    path = directory / f"{kind}.py"
    arguments = [
        "tar_shards.py",
        "--shards",
        str(directory / "shards"),
        "--epochs",
        "2",
        "--pause",
        str(pause),
    ]
    arguments += ["--num-workers", str(workers)]
    path.write_text(
        f"import runpy, sys\nsys.argv = {arguments!r}\nrunpy.run_path({str(example)!r}, "
        "run_name='__main__')\n"
    )
    return path


def test_worker_killed_within_its_shards_and_a_joiner_change_nothing_with_data_workers(
    zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    with cluster(
        zygote, tmp_path / "alone", max_workers=1, script=script(tmp_path, "alone", 0.0, 0)
    ) as alone:
        alone.start(0)
        alone.finish(0, may_end_well=True)
        expected = RESULTS.findall(alone.said())
    (tmp_path / "faulty").mkdir()
    with cluster(
        zygote, tmp_path / "faulty", max_workers=3, script=script(tmp_path, "faulty", 0.1, 2)
    ) as faulty:
        for index in range(3):
            faulty.start(index)
        faulty.wait_steps(6)
        assert faulty.steps() < STEPS // 2
        faulty.signal(1, signal.SIGKILL)
        faulty.start(3)
        faulty.wait_ranked(3)
        faulty.finish(0, 2, 3, may_end_well=True)
        found = RESULTS.findall(faulty.said())
    assert len(expected) == 3
    assert found == expected
    for run in ("alone", "faulty"):
        verdict = audit(tmp_path / run / "records")
        assert [(e.expected, e.once, e.lost, e.repeated) for e in verdict.epochs] == [
            (ITEMS, ITEMS, 0, 0)
        ] * 2


EVALUATES = """
import os, pathlib, time
import shoal, torch

shoal.init()
model = shoal.as_distributed(torch.nn.Linear(1, 1))
shards = shoal.ShardedStream(
    range(7), lambda shard: ([100.0 * shard + item] for item in range(3 * shard))
)
loader = shoal.ElasticDataLoader(shards, global_batch_size=2, train=False, collate_fn=torch.tensor)


def sums(model, batch):
    pathlib.Path(
        FOLDER, f"{shoal.rank()} {os.environ['SHOAL_LOCAL_INDEX']} {batch[0].item()}"
    ).touch()
    while shoal.world_size() == 3 and shoal.rank() == 1:
        time.sleep(0.01)  # it is killed in its first batch
    return {"sum": float(batch.sum()), "items": float(len(batch))}


found = shoal.evaluate(model, loader, sums)
print(f"sums {found['sum']:.0f} {found['items']:.0f}", flush=True)
"""


def test_worker_killed_during_an_evaluation_of_shards_neither_doubles_nor_loses_an_item(
    zygote: Zygote, tmp_path: Path
) -> None:
    computed = tmp_path / "computed"
    computed.mkdir()
    path = tmp_path / "evaluates.py"
    path.write_text(EVALUATES.replace("FOLDER", repr(str(computed))))
    with cluster(zygote, tmp_path, max_workers=3, script=path) as workers:
        for index in range(3):
            workers.start(index)
        eventually(lambda: [*computed.glob("1 *")], "a batch of rank 1")
        victim = int(next(computed.glob("1 *")).name.split()[1])
        workers.signal(victim, signal.SIGKILL)
        workers.finish(*(index for index in range(3) if index != victim), may_end_well=True)
        said = re.findall(r"^sums (\d+) (\d+)$", workers.said(), re.MULTILINE)
    expected = [100 * shard + item for shard in range(7) for item in range(3 * shard)]
    assert said == [(str(sum(expected)), str(len(expected)))] * 2


UNEVEN = """
import time
import shoal, torch

shoal.init()
model = shoal.as_distributed(torch.nn.Linear(1, 1))
shards = shoal.ShardedStream([1, 16, 1], lambda shard: ([1.0] for _ in range(shard)))
loader = shoal.ElasticDataLoader(shards, global_batch_size=2, train=False, collate_fn=torch.tensor)


def sums(model, batch):
    time.sleep(0.5)  # a shard takes longer than a collective may
    return {"items": float(len(batch))}


print(
    f"found {shoal.evaluate(model, loader, sums)['items']:.0f} on {shoal.world_size()}", flush=True
)
"""


def test_rank_with_a_long_shard_is_awaited_beyond_the_timeout_of_a_collective(
    zygote: Zygote, tmp_path: Path
) -> None:
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN)
    with cluster(
        zygote, tmp_path, max_workers=3, script=path, SHOAL_COLLECTIVE_TIMEOUT_S="1.5"
    ) as workers:
        for index in range(3):
            workers.start(index)
        workers.finish(0, 1, 2, may_end_well=True)
        assert re.findall(r"^found (.*)$", workers.said(), re.MULTILINE) == ["18 on 3"] * 3
