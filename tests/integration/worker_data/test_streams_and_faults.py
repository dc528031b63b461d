"""The example of .tar shards, elastic: a worker is killed in the middle of its shards, another joins, and nothing of the result differs."""

import re
import signal
from pathlib import Path

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

PARAMETERS = re.compile(r"^parameters (\w+)$", re.MULTILINE)
STEPS = 38
ITEMS = 1797

pytestmark = pytest.mark.slow


def script(directory: Path, kind: str, pause: float) -> Path:
    """Runs the example with its command line; the worker's program takes none."""
    example = Path(__file__).parents[3] / "examples" / "tar_shards.py"
    path = directory / f"{kind}.py"
    arguments = ["tar_shards.py", "--shards", str(directory / "shards"), "--epochs", "2", "--pause", str(pause)]
    path.write_text(f"import runpy, sys\nsys.argv = {arguments!r}\nrunpy.run_path({str(example)!r}, run_name='__main__')\n")
    return path


def test_a_worker_killed_within_its_shards_and_one_that_joins_change_nothing(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with cluster(zygote, tmp_path / "alone", max_workers=1, script=script(tmp_path, "alone", 0.0)) as alone:
        alone.start(0)
        alone.finish(0, may_end_well=True)
        expected = PARAMETERS.findall(alone.said())
    (tmp_path / "faulty").mkdir()
    with cluster(zygote, tmp_path / "faulty", max_workers=3, script=script(tmp_path, "faulty", 0.1)) as faulty:
        for index in range(3):
            faulty.start(index)
        faulty.wait_steps(6)
        assert faulty.steps() < STEPS // 2
        faulty.signal(1, signal.SIGKILL)
        faulty.start(3)
        faulty.wait_ranked(3)
        faulty.finish(0, 2, 3, may_end_well=True)
        found = PARAMETERS.findall(faulty.said())
    assert len(expected) == 1
    assert found == expected
    for run in ("alone", "faulty"):
        verdict = audit(tmp_path / run / "records")
        assert [(e.expected, e.once, e.lost, e.repeated) for e in verdict.epochs] == [(ITEMS, ITEMS, 0, 0)] * 2
