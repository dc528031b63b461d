"""Scripts with more than one training loader: joiners and resumed runs continue in the right loader
at the right epoch."""

import signal
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "two_loaders.py"
EPOCHS = 3


@pytest.fixture(scope="module")
def fault_free(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with cluster(
        zygote, tmp_path_factory.mktemp("alone"), max_workers=1, script=SCRIPT, EPOCHS=str(EPOCHS)
    ) as running:
        running.start(0)
        (result,) = running.finish(0)
    assert (result["steps"], result["second"]) == (8 * EPOCHS, 6 * EPOCHS)
    return result


@pytest.mark.parametrize("joins_at_step", [1, 4, 9])
def test_joiner_enters_the_loop_of_its_peers(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any], joins_at_step: int
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, EPOCHS=str(EPOCHS)
    ) as running:
        running.start(0, SHOAL_FAILPOINTS=f"session.after_commit@{joins_at_step}=kill")
        running.start(1)
        assert running.workers[0].wait() == -signal.SIGKILL
        running.start(2)
        results = running.finish(1, 2)
        assert {r["world"] for r in results} == {2}
        assert results == [fault_free | {"world": 2}] * 2
        verdict = audit(running.records)
        assert [e.exactly_once for e in verdict.epochs if e.loader == "second"] == [True] * EPOCHS
        assert {(e.once, e.repeated) for e in verdict.epochs if e.loader == "first"} == {(32, 0)}


def test_resumed_run_continues_with_the_second_loader_where_it_was(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    with cluster(
        zygote,
        tmp_path / "before",
        max_workers=1,
        script=SCRIPT,
        EPOCHS="2",
        CHECKPOINTS=checkpoints,
    ) as running:
        running.start(0)
        running.finish(0)
    with cluster(
        zygote,
        tmp_path / "after",
        max_workers=1,
        script=SCRIPT,
        EPOCHS=str(EPOCHS),
        CHECKPOINTS=checkpoints,
    ) as running:
        running.start(0)
        assert running.finish(0) == [fault_free]


def test_a_checkpoint_damaged_on_the_disk_ends_the_run_with_one_clear_error(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Unlike a state that was damaged in transit between ranks, a damaged file stays the same if it
    is read again."""
    damaged = tmp_path / "checkpoints" / "step-7"
    damaged.mkdir(parents=True)
    (damaged / "checkpoint.json").write_text("{")
    with cluster(
        zygote,
        tmp_path,
        min_workers=2,
        max_workers=2,
        script=SCRIPT,
        EPOCHS="1",
        CHECKPOINTS=str(damaged.parent),
    ) as running:
        running.start(0)
        running.start(1)
        for worker in (running.workers[0], running.workers[1]):
            assert worker.wait() == 1
            assert "CorruptDataError" in worker.said()
            assert "step-7 is damaged" in worker.said()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_deterministic_results_are_bitwise_equal_for_any_world(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any], world: int
) -> None:
    with cluster(zygote, tmp_path, max_workers=world, script=SCRIPT, EPOCHS=str(EPOCHS)) as running:
        for index in range(world):
            running.start(index)
        assert running.finish(*range(world)) == [fault_free | {"world": world}] * world


def test_peeked_batch_and_a_pass_before_the_loop_do_not_make_a_joiner_live(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, EPOCHS=str(EPOCHS), LOOK="1"
    ) as running:
        running.start(0, SHOAL_FAILPOINTS="session.after_commit@1=kill")
        running.start(1)
        assert running.workers[0].wait() == -signal.SIGKILL
        running.start(2)
        one, other = running.finish(1, 2)
        assert one == other
        assert (one["steps"], one["second"], one["world"]) == (8 * EPOCHS, 6 * EPOCHS, 2)
