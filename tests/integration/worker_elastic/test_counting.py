"""Operations that a script calls every few steps, across a kill and a replacement. Counted in the
run's steps, they happen at the same steps on all ranks. A count of the script's own differs between
ranks, and they fail at once with an error that names the call."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "counting.py"


@contextmanager
def one_replaced(zygote: Zygote, directory: Path, **environment: str) -> Iterator[Cluster]:
    """Starts two workers. One is killed in the middle of its first epoch, and a new one replaces
    it."""
    checkpoints = str(directory / "checkpoints")
    with cluster(
        zygote,
        directory,
        min_workers=2,
        max_workers=2,
        script=SCRIPT,
        CHECKPOINTS=checkpoints,
        **environment,
    ) as running:
        running.start(0, SHOAL_FAILPOINTS="session.after_commit@4=kill")
        running.start(1)
        assert running.workers[0].wait() == -signal.SIGKILL
        running.start(2)
        yield running


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_every_n_steps_neither_skips_nor_repeats_a_step_after_a_kill_and_a_replacement(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with one_replaced(zygote, tmp_path, COUNT="every_steps", STRATEGY=strategy) as running:
        survivor, joiner = running.finish(1, 2)
        assert survivor["digest"] == joiner["digest"]
        assert [step for step, _ in survivor["evaluated"]] == [3, 6, 9, 12, 15, 18]
        assert joiner["evaluated"] == survivor["evaluated"][1:]
        saved = {
            int(path.name.removeprefix("step-"))
            for path in (tmp_path / "checkpoints").glob("step-*")
        }
        # the killed worker may have been writing the checkpoint of the third step
        assert saved | {3} == {3, 6, 9, 12, 15, 18}
        # A sampler with its own unseeded generator draws the same samples on all ranks, also on the
        # joiner in the middle of the epoch.
        assert all(epoch.exactly_once for epoch in audit(running.records).epochs)


@pytest.mark.parametrize(
    ("count_by", "strategy", "operation"),
    [
        pytest.param("enumerate", "ddp", "evaluate", marks=pytest.mark.matrix),
        ("own count", "ddp", "evaluate"),
        ("enumerate", "zero3", "evaluate"),
        ("plain save, enumerate", "zero2", "save_checkpoint"),
    ],
)
def test_scripts_own_counter_ends_the_run_at_once_with_one_error_that_names_the_remedy(
    zygote: Zygote, tmp_path: Path, count_by: str, strategy: str, operation: str
) -> None:
    """The error comes before the collective's timeout, whose default is 300 s: this worker has less
    time to end."""
    with one_replaced(zygote, tmp_path, COUNT=count_by, STRATEGY=strategy) as running:
        for worker in (running.workers[1], running.workers[2]):
            assert worker.wait() == 1, worker.said()
            said = worker.said()
            assert f"is in {operation}" in said
            assert "is in a step of loader 'loader'" in said
            assert (
                "For actions every k steps, use loader.global_step, or every_steps= of "
                "save_checkpoint and evaluate" in said
            )
