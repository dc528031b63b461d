"""Workers with inner steps, as processes: each round is applied completely and once, even if a
worker dies, leaves or joins during it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_worker.data.record import audit
from torch import nn

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.test_async_leases import versions
from tests.integration.worker_async.train import LEFT, SAMPLES, network, problem
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]

STEPS = 5
BATCHES = SAMPLES // 8
ROUNDS = -(-BATCHES // STEPS)
"""Number of rounds per epoch. The last round has fewer batches."""
INNER = {"inner_steps": STEPS, "lease_ahead_s": 0}
"""Each round is leased and acknowledged separately, so the test can tell which rounds a dead worker
has left undone."""
TRAINING: dict[str, Any] = {
    "epochs": 2,
    "optimizer": "AdamW",
    "settings": {"lr": 0.01},
    "outer": {"lr": 0.5},
    "options": INNER,
}


def test_workers_converge_together_and_every_sample_counts_once(cluster: Make) -> None:
    running = cluster(together=2)
    workers = [running.start_worker(**TRAINING | {"epochs": 8}) for _ in range(2)]
    results = [worker.result() for worker in workers]
    assert sum(result["steps"] for result in results) == 8 * BATCHES
    assert max(result["error"] for result in results) < 0.1
    assert results[0]["parameters"] == results[1]["parameters"]
    assert versions(running) == {1 + 8 * ROUNDS}
    assert audit(running.records).exactly_once


def test_round_of_a_worker_that_dies_within_it_does_not_count(cluster: Make) -> None:
    running = cluster(together=2)
    victim = running.start_worker(**TRAINING, hold_at=[STEPS + 3])
    other = running.start_worker(**TRAINING, hold_at=[2])
    victim.wait_step(STEPS + 3)
    other.wait_step(2)
    victim.process.kill()
    other.go(2)
    assert other.result()["steps"] == 2 * BATCHES - STEPS
    assert versions(running) == {1 + 2 * ROUNDS}
    assert audit(running.records).exactly_once


@pytest.mark.parametrize(
    "failpoint", ["exchange.server_answered@3", "exchange.done@2", "session.after_apply@10"]
)
def test_round_of_a_worker_that_dies_around_its_push_is_not_applied_twice(
    cluster: Make, failpoint: str
) -> None:
    """The worker dies around the push of its second round. One or both servers have that push, and
    nobody has received its acknowledgement."""
    running = cluster(together=2)
    victim = running.start_worker(**TRAINING, environment={"SHOAL_FAILPOINTS": f"{failpoint}=kill"})
    other = running.start_worker(**TRAINING, hold_at=[0])
    assert victim.process.wait() == -signal.SIGKILL
    other.go(0)
    result = other.result()
    assert result["steps"] == 2 * BATCHES - STEPS
    again = len(result["computed_on"]) - len(set(result["computed_on"]))
    if failpoint.startswith("exchange.server_answered"):
        # the other server may have received its push before the kill
        assert again <= 1
    else:
        assert again == 1, (
            "behind a round that all servers had the values are those that it began with"
        )
    assert versions(running) == {1 + 2 * ROUNDS}
    assert audit(running.records).exactly_once


@pytest.mark.parametrize("ahead_s", [0, 600])
def test_killed_server_has_every_round_exactly_once_after_its_restart(
    cluster: Make, ahead_s: float
) -> None:
    running = cluster()
    worker = running.start_worker(
        **TRAINING | {"options": {**INNER, "lease_ahead_s": ahead_s}}, hold_at=[7, 2 * STEPS]
    )
    for step in (7, 2 * STEPS):
        worker.wait_step(step)
        running.servers[0].process.kill()
        running.servers[0].process.wait()
        worker.go(step)
        eventually(
            lambda seen=step: worker.process.said().count("Push failed") >= (1 if seen == 7 else 2),
            "the worker to miss it",
        )
        running.servers[0].start()
    assert worker.result()["steps"] == 2 * BATCHES
    assert versions(running) == {1 + 2 * ROUNDS}
    assert audit(running.records).exactly_once


def test_worker_asked_to_leave_within_a_round_pushes_it_first(cluster: Make) -> None:
    running = cluster(together=2)
    leaving, staying = (
        running.start_worker(**TRAINING, hold_at=[STEPS + 1]),
        running.start_worker(**TRAINING, hold_at=[1]),
    )
    leaving.wait_step(STEPS + 1)
    staying.wait_step(1)
    leaving.process.kill(signal.SIGTERM)
    leaving.go(STEPS + 1)
    assert leaving.process.wait() == 0, leaving.process.said()
    assert leaving.reached(2 * STEPS - 1)
    assert not leaving.reached(2 * STEPS)
    staying.go(1)
    assert staying.result()["steps"] == 2 * BATCHES - 2 * STEPS
    assert versions(running) == {1 + 2 * ROUNDS}
    assert audit(running.records).exactly_once


def test_stopped_job_ends_with_complete_rounds(cluster: Make) -> None:
    running = cluster(together=2)
    workers = [running.start_worker(**TRAINING | {"epochs": 1000}, hold_at=[2]) for _ in range(2)]
    for worker in workers:
        worker.wait_step(2)
    running.client.stop_job(running.job_id, reason="enough")
    for worker in workers:
        worker.go(2)
    results = [worker.result() for worker in workers]
    assert [result["steps"] % STEPS for result in results] == [0, 0]
    taken = sum(result["steps"] for result in results)
    assert versions(running) == {1 + taken // STEPS}
    assert audit(running.records).once == 8 * taken


def test_joiner_starts_a_round_with_the_servers_values_and_a_peers_schedules(
    cluster: Make,
) -> None:
    running = cluster()
    config = TRAINING | {"epochs": 4, "schedule": "epochs", "gamma": 0.5}
    begun = 2 * BATCHES + STEPS + 2
    # copies for joiners are at least fifty times their own duration apart
    first = running.start_worker(**config, hold_at=[begun], delay_s=0.02)
    first.wait_step(begun)
    eventually(
        lambda: running.job().members[0].progress.epoch == 2, "a heartbeat to tell the epoch"
    )
    joiner = running.start_worker(**config, hold_at=[1])
    joiner.wait_step(1)
    running.wait_world(2)
    first.go(begun)
    joiner.go(1)
    results = [first.result(), joiner.result()]
    assert results[1]["epochs"] == [2, 3]
    # A peer offers a copy made at one of its last step boundaries, perhaps before its scheduler's
    # step at the end of the last epoch.
    assert any(results[1]["lr"] == pytest.approx(0.01 * 0.5**steps) for steps in (3, 4))
    assert results[1]["computed_on"][0] == results[0]["computed_on"][2 * BATCHES + STEPS], (
        "the last that was pushed"
    )
    assert sum(result["steps"] for result in results) == 4 * BATCHES
    assert audit(running.records).exactly_once


@pytest.mark.parametrize(
    "options",
    [{"consistency": "ssp", "staleness_bound": 0}, {"consistency": "bsp"}],
    ids=["ssp", "bsp"],
)
def test_workers_wait_for_each_other_by_rounds(cluster: Make, options: dict[str, Any]) -> None:
    """The rounds divide the epoch evenly, and one worker is slow. Under bsp all workers begin a
    round on the same values."""
    running = cluster(together=2)
    config = TRAINING | {"options": {**INNER, "inner_steps": 4, **options}, "epochs": 3}
    workers = [running.start_worker(**config, delay_s=delay) for delay in (0.0, 0.005)]
    results = [worker.result() for worker in workers]
    assert sum(result["steps"] for result in results) == 3 * BATCHES
    if options["consistency"] == "bsp":
        left, right = (result["computed_on"][::4] for result in results)
        common = [each for each in left if each in right]
        assert common == [each for each in right if each in left]
        assert len(common) > min(len(left), len(right)) / 2
    assert versions(running) == {1 + 3 * BATCHES // 4}
    assert audit(running.records).exactly_once


def rounds_of(records: Path) -> list[list[list[int]]]:
    """Returns the samples of each batch of each worker, in the order in which the worker received
    them."""
    workers = []
    for file in sorted(records.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        workers.append([line["samples"] for line in lines if line["kind"] == "dealt"])
    return workers


def test_bsp_with_delayed_nesterov_is_diloco_over_all_workers(cluster: Make) -> None:
    """Compares each iteration with Algorithm 1 of Douillard et al. for two workers: one outer step
    with the mean of the workers' updates."""
    running = cluster(together=2)
    config = TRAINING | {
        "options": {**INNER, "inner_steps": 4, "consistency": "bsp"},
        "epochs": 1,
        "hold_at": [0],
    }
    del config["outer"]
    workers = [running.start_worker(**config, delayed={"every": 2}) for _ in range(2)]
    for worker in workers:
        worker.wait_step(0)
    for worker in workers:
        worker.go(0)
    results = [worker.result() for worker in workers]
    assert [result["steps"] for result in results] == [BATCHES // 2] * 2

    data, taken = problem(), rounds_of(running.records)
    replicas = [network(0) for _ in taken]
    inner = [torch.optim.AdamW(net.parameters(), 0.01) for net in replicas]
    whole = network(0)
    outer = torch.optim.SGD(whole.parameters(), 0.7, momentum=0.9, nesterov=True)
    for begin in range(0, BATCHES // 2, 4):
        for net, optimizer, batches in zip(replicas, inner, taken, strict=True):
            net.load_state_dict(whole.state_dict())
            for samples in batches[begin : begin + 4]:
                inputs, targets = data[samples]
                optimizer.zero_grad()
                nn.functional.mse_loss(net(inputs), targets).backward()
                optimizer.step()
        for parameter, *moved in zip(
            whole.parameters(), *(net.parameters() for net in replicas), strict=True
        ):
            parameter.grad = parameter.detach() - torch.stack(
                [each.detach() for each in moved]
            ).mean(0)
        outer.step()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            torch.tensor(results[0]["parameters"][name]), value, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("leaves", ["leaves_after", "leaves_before"])
@pytest.mark.parametrize(
    "options",
    [{"consistency": "ssp", "staleness_bound": 0}, {"consistency": "bsp"}],
    ids=["ssp", "bsp"],
)
def test_worker_that_left_its_loop_within_a_round_is_not_awaited(
    cluster: Make, options: dict[str, Any], leaves: str
) -> None:
    """The worker leaves its loop after a step, or while it has a batch that it has not trained."""
    running = cluster(together=2)
    config = TRAINING | {"options": {**INNER, **options}, "epochs": 1}
    left = running.start_worker(**config, **{leaves: STEPS + 2}, hold_at=[LEFT])
    other = running.start_worker(**config)
    left.wait_step(LEFT)
    assert other.result()["steps"] == BATCHES - STEPS
    left.go(LEFT)
    assert left.result()["committed"] == STEPS + 2
    assert versions(running) == {1 + ROUNDS}
    assert audit(running.records).exactly_once


def test_workers_with_rounds_of_another_length_are_refused(cluster: Make) -> None:
    running = cluster(together=2)
    workers = [
        running.start_worker(**TRAINING | {"options": {**INNER, "inner_steps": steps}}, hold_at=[0])
        for steps in (4, 5)
    ]
    eventually(
        lambda: any(worker.process.ended.is_set() for worker in workers), "one of them to end"
    )
    refused = next(worker for worker in workers if worker.process.ended.is_set())
    assert (
        "all members must use the same dataset, batch size and inner_steps"
        in refused.process.said()
    )
