"""`epochs(max_steps=)` on workers that die and join: exactly that many steps are committed, and
each of their samples is dealt once."""

import signal
from pathlib import Path

from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote

STEPS = 25
"""Two epochs of 10 steps, and half of a third."""
OPTIONS = {"EPOCHS": "100", "MICRO": "1", "MAX_STEPS": str(STEPS)}


def counts(running: Cluster) -> list[tuple[int, int]]:
    """Returns how many samples count once, and how many more than once, in each epoch."""
    return [(epoch.once, epoch.repeated) for epoch in audit(running.records).epochs]


def test_kill_and_join_change_neither_the_number_of_steps_nor_their_result(
    zygote: Zygote, tmp_path: Path
) -> None:
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
    with cluster(zygote, tmp_path / "alone", max_workers=1, **OPTIONS) as running:
        running.start(0)
        (alone,) = running.finish(0)
    assert alone["steps"] == STEPS
    with cluster(zygote, tmp_path / "killed", **OPTIONS) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(2)
            members = [member.progress for member in running.job().members if member.rank >= 0]
            assert {progress.steps_in_all for progress in members} == {STEPS}
            running.signal(1, signal.SIGKILL)
            running.start(3)
            running.wait_ranked(3)
        results = running.finish(0, 2, 3)
        assert counts(running) == [(480, 0), (480, 0), (5 * 48, 0)]
    assert [result["steps"] for result in results] == [STEPS] * 3
    assert {result["digest"] for result in results} == {alone["digest"]}
    assert {result["epochs_scheduled"] for result in results} == {alone["epochs_scheduled"]}


def test_last_step_aborted_by_a_death_is_taken_again(zygote: Zygote, tmp_path: Path) -> None:
    with cluster(zygote, tmp_path, **OPTIONS) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS=f"session.before_apply@{STEPS}=kill")
        running.start(2)
        results = running.finish(0, 2)
        assert [result["steps"] for result in results] == [STEPS] * 2
        assert len({result["digest"] for result in results}) == 1
        assert counts(running) == [(480, 0), (480, 0), (5 * 48, 0)]


def test_resumed_run_with_more_steps_continues_within_the_epoch(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The run ends like one that was not interrupted."""
    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    with cluster(zygote, tmp_path / "whole", max_workers=1, EPOCHS="4", MICRO="1") as running:
        running.start(0)
        (whole,) = running.finish(0)
    options = {**OPTIONS, "CHECKPOINTS": str(tmp_path / "checkpoints")}
    with cluster(zygote, tmp_path / "first", **options) as running:
        for index in range(3):
            running.start(index)
        running.finish(0, 1, 2)
    with cluster(
        zygote, tmp_path / "second", max_workers=2, **{**options, "MAX_STEPS": "40"}
    ) as running:
        for index in range(2):
            running.start(index)
        results = running.finish(0, 1)
        assert counts(running) == [(5 * 48, 0), (480, 0)]
    assert [result["steps"] for result in results] == [40] * 2
    assert {result["digest"] for result in results} == {whole["digest"]}
