"""Work that one rank, or one process of each machine, does for all: never done by a process that
replays its script, nor by more than one process."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "asks_for_rank.py"


def test_joiner_that_replays_its_script_is_not_mistaken_for_rank_0(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT) as running:
        running.start(0, SHOAL_FAILPOINTS="session.after_commit@3=kill")
        running.start(1)
        assert running.workers[0].wait() == -signal.SIGKILL
        running.start(2)
        survivor, joiner = running.finish(1, 2)
    joining, *ranks = survivor["at_top"]
    assert (joining, ranks) in ((False, [rank, 2, rank, rank, rank]) for rank in (0, 1))
    assert joiner["at_top"] == [True, -1, -1, -1, -1, -1]
    for received in (survivor, joiner):
        joining, rank, world_size, torchs_rank = received["in_the_end"]
        assert (joining, world_size, rank) == (False, 2, torchs_rank)
    assert {survivor["in_the_end"][1], joiner["in_the_end"][1]} == {0, 1}


def first_of(zygote: Zygote, directory: Path, job: str, run: str, end: str = "") -> str:
    """Starts a process of this run and returns the value that `main_first` gives it. `end`:
    statement that it runs within the block."""
    program = (
        "import os, shoal\nwith shoal.main_first() as first:\n    print(first, "
        f"flush=True)\n    {end or 'pass'}"
    )
    script = directory / "script.py"
    script.write_text(program)
    output = directory / uuid.uuid4().hex
    zygote.start("script", [str(script)], output=output, SHOAL_JOB_ID=job, SHOAL_RUN=run).wait()
    return output.read_text().strip()


def test_main_first_is_true_for_one_process_of_each_run_even_after_the_others_died(
    zygote: Zygote, tmp_path: Path
) -> None:
    job = f"job-{uuid.uuid4().hex}"
    # the process ends before it has done the work
    assert first_of(zygote, tmp_path, job, "1:5", end="os._exit(1)") == "True"
    assert [first_of(zygote, tmp_path, job, run) for run in ("1:5", "1:5", "2:9")] == [
        "True",
        "False",
        "True",
    ]
