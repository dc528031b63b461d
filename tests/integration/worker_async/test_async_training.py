"""Asynchronous training with a real coordinator, two real parameter servers and real worker
processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.train import EPOCH_END, LEFT, SAMPLES, network
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]

BATCHES = SAMPLES // 8
BSP = {"consistency": "bsp"}
EACH_BY_ITSELF = {"lease_ahead_s": 0}
"""Each batch is leased and acknowledged before the next one begins, so the test can tell which
batches a dead worker has left undone."""


def test_workers_start_with_rank_0s_weights_and_converge_together(cluster: Make) -> None:
    running = cluster(together=3)
    workers = [running.start_worker(seed=seed, epochs=6, hold_at=[0]) for seed in range(3)]
    for worker in workers:
        worker.wait_step(0)
    rank_0 = int(running.job().generation.ranks[0].member_id.split("-")[1])
    for worker in workers:
        worker.go(0)
    results = [worker.result() for worker in workers]

    assert max(result["error"] for result in results) < 0.05
    assert sum(result["steps"] for result in results) == 6 * BATCHES
    assert all(result["committed"] == result["steps"] > 0 for result in results)
    weights = {name: value.tolist() for name, value in network(rank_0).named_parameters()}
    assert [result["first_parameters"] for result in results] == [weights] * 3
    found = audit(running.records)
    assert found.exactly_once
    assert len(found.epochs) == 6
    # All workers had finished the last epoch before any of them read the parameters.
    assert results[0]["parameters"] == results[1]["parameters"] == results[2]["parameters"]


@pytest.mark.parametrize("together", [2, 1])
def test_workers_start_with_rank_0s_buffers_and_a_joiner_with_a_peers(
    cluster: Make, together: int
) -> None:
    """Each script draws its random features from a different seed. Training would fail if workers
    used different features."""
    running = cluster(together=together)
    workers = []
    for seed in range(2):
        workers.append(running.start_worker(seed=seed, random_features=True, epochs=2, hold_at=[1]))
        if seed == 1 or together == 1:
            workers[seed].wait_step(1)
    for worker in workers:
        worker.go(1)
    results = [worker.result() for worker in workers]
    assert sorted(results[0]["first_buffers"]) == ["0.scales", "0.table"]
    assert results[0]["first_buffers"] == results[1]["first_buffers"]


def test_batches_of_a_killed_worker_are_trained_by_others_without_interruption(
    cluster: Make,
) -> None:
    running = cluster(together=3)
    victim = running.start_worker(epochs=2, options=EACH_BY_ITSELF, hold_at=[3])
    # They are held: otherwise they could train all batches before the victim reaches its fourth.
    others = [running.start_worker(epochs=2, options=EACH_BY_ITSELF, hold_at=[4]) for _ in range(2)]
    victim.wait_step(3)
    victim.process.kill()
    for worker in others:
        worker.wait_step(4)
        worker.go(4)
    results = [worker.result() for worker in others]

    assert victim.process.wait() == -signal.SIGKILL
    assert sum(result["steps"] for result in results) == 2 * BATCHES - 3
    assert all(result["committed"] == result["steps"] for result in results)
    assert audit(running.records).exactly_once


def test_a_worker_killed_between_its_push_and_the_acknowledgement_has_no_batch_applied_twice(
    cluster: Make,
) -> None:
    running = cluster(together=2)
    batches = 8
    # With ssp the other worker waits for the victim at the end of its third iteration, so the
    # victim reaches its own third.
    config = {
        "epochs": 2,
        "batch_size": SAMPLES // batches,
        "options": EACH_BY_ITSELF | {"consistency": "ssp", "staleness_bound": 0},
    }
    victim = running.start_worker(
        **config, environment={"SHOAL_FAILPOINTS": "session.after_apply@3=kill"}
    )
    # The victim trains two batches of the first epoch. Its third one is dealt again, because it was
    # pushed but not acknowledged.
    other = running.start_worker(**config, hold_at=[batches - 2])
    other.wait_step(batches - 2)
    assert victim.process.wait() == -signal.SIGKILL
    for server in running.servers:
        assert {partition.version for partition in server.look().partitions} == {1 + batches}
    other.go(batches - 2)
    assert other.result()["steps"] == 2 * batches - 2


def test_ssp_keeps_every_worker_within_the_bound(cluster: Make) -> None:
    running = cluster(together=2)
    options = {"consistency": "ssp", "staleness_bound": 2}
    slow, fast = (
        running.start_worker(epochs=1, hold_at=[1], options=options),
        running.start_worker(epochs=1, options=options),
    )
    slow.wait_step(1)
    # The victim has finished 1 iteration. The other worker may finish 3, and a fourth whose end
    # waits.
    eventually(
        lambda: all(sorted(server.look().clocks.values()) == [1, 4] for server in running.servers),
        "the fast worker to wait",
    )
    assert fast.reached(3)
    assert not fast.reached(4)
    slow.go(1)
    assert slow.result()["steps"] + fast.result()["steps"] == BATCHES


@pytest.mark.parametrize(
    "options", [{"consistency": "ssp", "staleness_bound": 0}, BSP], ids=["ssp", "bsp"]
)
def test_worker_without_batches_delays_nobody(cluster: Make, options: dict[str, Any]) -> None:
    running = cluster(together=2)
    workers = [
        running.start_worker(epochs=3, batch_size=SAMPLES // 3, options=options, delay_s=delay)
        for delay in (0.0, 0.03)
    ]
    assert sum(worker.result()["steps"] for worker in workers) == 3 * 4
    assert audit(running.records).exactly_once


def in_common(left: list[int], right: list[int]) -> tuple[list[int], list[int]]:
    """Returns the parameter hashes that occur in both lists, in the order of each list."""
    return [each for each in left if each in right], [each for each in right if each in left]


def test_bsp_workers_including_a_joiner_compute_an_iteration_on_the_same_values(
    cluster: Make,
) -> None:
    """There are two servers, workers of different speeds, and more than one epoch. Under asp, the
    workers would have only the first values in common."""
    running = cluster(together=1)
    slow = running.start_worker(epochs=3, options=BSP, hold_at=[4], delay_s=0.01)
    slow.wait_step(4)
    fast = running.start_worker(epochs=3, options=BSP)
    running.wait_world(2)
    slow.go(4)
    results = [worker.result() for worker in (slow, fast)]
    assert sum(result["steps"] for result in results) == 3 * BATCHES
    left, right = in_common(*(result["computed_on"] for result in results))
    assert left == right
    # Each worker computed some iterations alone: before the joiner came, and at the end of an
    # epoch, when the other had no batch.
    assert len(left) > min(result["steps"] for result in results) / 2
    assert audit(running.records).exactly_once


def test_bsp_workers_continue_after_a_killed_worker_and_a_restarted_server(
    cluster: Make,
) -> None:
    running = cluster(together=3)
    victim = running.start_worker(epochs=2, options=BSP, hold_at=[3])
    others = [running.start_worker(epochs=2, options=BSP, hold_at=[3]) for _ in range(2)]
    for worker in (victim, *others):
        worker.wait_step(3)
    running.servers[0].process.kill()
    running.servers[0].process.wait()
    running.servers[0].start()
    for worker in others:
        worker.go(3)
    victim.process.kill()
    results = [worker.result() for worker in others]
    left, right = in_common(*(result["computed_on"] for result in results))
    assert left == right
    assert len(left) >= 6
    assert audit(running.records).exactly_once


def test_bsp_worker_that_waits_for_another_leaves_when_asked(cluster: Make) -> None:
    running = cluster(together=2)
    held = running.start_worker(epochs=1, options=BSP, hold_at=[1])
    leaving = running.start_worker(epochs=1, options=BSP)
    held.wait_step(1)
    leaving.wait_step(1)
    eventually(
        lambda: all(2 in server.look().iterations.values() for server in running.servers),
        "a push that waits for the other's",
    )
    leaving.process.kill_beside(signal.SIGTERM)
    assert leaving.process.wait() == 0, leaving.process.said()
    assert not leaving.reached(2)
    held.go(1)
    assert held.result()["steps"] >= BATCHES - 2
    assert audit(running.records).exactly_once


def test_schedule_that_is_furthest_ahead_counts(cluster: Make) -> None:
    running = cluster(together=2)
    fast = running.start_worker(epochs=1, gamma=0.9, schedule="iterations", hold_at=[10])
    slow = running.start_worker(epochs=1, gamma=0.9, schedule="iterations", hold_at=[4, 8])

    def rates() -> list[float]:
        return [server.look().optimizer.hyperparameters["lr"] for server in running.servers]

    fast.wait_step(10)
    slow.wait_step(4)
    # the rate of its push number 10; the tenth step of its scheduler is sent with the next push
    assert rates() == pytest.approx([0.05 * 0.9**9] * 2)
    slow.go(4)
    slow.wait_step(8)
    assert rates() == pytest.approx([0.05 * 0.9**9] * 2)
    fast.go(10)
    slow.go(8)
    assert fast.result()["steps"] + slow.result()["steps"] == BATCHES


def test_joiner_continues_in_the_epoch_of_the_others(cluster: Make) -> None:
    running = cluster()
    config: dict[str, Any] = {"epochs": 4, "schedule": "epochs", "gamma": 0.5}
    # the state is so large that it is copied only once in each epoch
    first = running.start_worker(**config, copies_rest=1e9, hold_at=[2 * BATCHES + 16])
    first.wait_step(2 * BATCHES + 16)
    eventually(
        lambda: running.job().members[0].progress.epoch == 2, "a heartbeat to tell the epoch"
    )
    joiner = running.start_worker(**config, hold_at=[1])
    joiner.wait_step(1)
    running.wait_world(2)
    first.go(2 * BATCHES + 16)
    joiner.go(1)
    results = [first.result(), joiner.result()]
    assert results[1]["epochs"] == [2, 3]
    # its scheduler continued after the two steps of the other worker
    assert results[1]["lr"] == pytest.approx(0.05 * 0.5**4)
    assert sum(result["steps"] for result in results) == 4 * BATCHES
    assert audit(running.records).exactly_once


def test_joiner_continues_in_the_epoch_of_the_state_that_it_receives(cluster: Make) -> None:
    """The worker that sends its state has not yet stepped the scheduler at the end of an epoch,
    and another worker is already in the next epoch."""
    running = cluster()
    config: dict[str, Any] = {"epochs": 4, "schedule": "epochs", "gamma": 0.5}
    first = running.start_worker(**config, hold_at=[3, EPOCH_END])
    first.wait_step(3)
    second = running.start_worker(**config, hold_at=[1, EPOCH_END + 1])
    second.wait_step(1)
    second.go(1)
    first.go(3)
    first.wait_step(EPOCH_END)
    second.wait_step(EPOCH_END + 1)
    third = running.start_worker(**config, hold_at=[EPOCH_END + 1])
    third.wait_step(EPOCH_END + 1)
    for worker, hold in ((first, 0), (second, 1), (third, 1)):
        worker.go(EPOCH_END + hold)
    results = [worker.result() for worker in (first, second, third)]
    assert [result["epochs"] for result in results] == [[0, 1, 2, 3]] * 3
    assert [result["lr"] for result in results] == [pytest.approx(0.05 * 0.5**4)] * 3
    assert audit(running.records).exactly_once


def test_a_drained_worker_leaves_with_all_its_batches_acknowledged(cluster: Make) -> None:
    running = cluster(together=2)
    leaving, staying = (
        running.start_worker(epochs=1, hold_at=[2]),
        running.start_worker(epochs=1, hold_at=[1]),
    )
    leaving.wait_step(2)
    staying.wait_step(1)
    leaving.process.kill(signal.SIGTERM)
    leaving.go(2)
    assert leaving.process.wait() == 0
    staying.go(1)
    assert staying.result()["steps"] == BATCHES - 3
    assert audit(running.records).exactly_once


def test_stopped_job_ends_all_loops_even_of_workers_without_a_batch(cluster: Make) -> None:
    running = cluster(together=2)
    epochs = 1000  # one batch each; both workers are stopped long before the end
    holding = running.start_worker(epochs=epochs, batch_size=SAMPLES, hold_at=[0])
    idle = running.start_worker(epochs=epochs, batch_size=SAMPLES, hold_at=[0])
    eventually(lambda: holding.reached(0) or idle.reached(0), "one of them to get the only batch")
    running.client.stop_job(running.job_id, reason="enough")
    for worker in (holding, idle):
        worker.go(0)
    assert sum(worker.result()["steps"] for worker in (holding, idle)) < epochs


def test_remaining_workers_wait_while_there_are_too_few(cluster: Make) -> None:
    running = cluster(together=2, min_workers=2)
    victim, survivor = (
        running.start_worker(epochs=2, options=EACH_BY_ITSELF, hold_at=[2]),
        running.start_worker(epochs=2, options=EACH_BY_ITSELF, hold_at=[5]),
    )
    victim.wait_step(2)
    survivor.wait_step(5)
    victim.process.kill()
    eventually(
        lambda: not any(server.look().clocks for server in running.servers),
        "the servers to know of no member",
    )
    survivor.go(5)
    replacement = running.start_worker(epochs=2, options=EACH_BY_ITSELF)
    assert survivor.result()["steps"] + replacement.result()["steps"] == 2 * BATCHES - 2
    assert audit(running.records).exactly_once


@pytest.mark.parametrize(
    "options", [{"consistency": "ssp", "staleness_bound": 0}, BSP], ids=["ssp", "bsp"]
)
def test_worker_that_has_left_its_loop_is_not_awaited(
    cluster: Make, options: dict[str, Any]
) -> None:
    running = cluster(together=2)
    left = running.start_worker(epochs=1, options=options, leaves_after=3, hold_at=[LEFT])
    other = running.start_worker(epochs=1, options=options)
    left.wait_step(LEFT)
    other.wait_step(10)
    left.go(LEFT)
    assert other.result()["steps"] > 10
    left.result()
