"""Seeded schedules of faults over one long run. Whatever happens, it must end with the parameters
of the run without a fault, bit for bit, and every sample must have counted exactly once.
SOAK_SEEDS=1,2,3 chooses the schedules; a failure names its seed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote, eventually

EPOCHS = 30
FAULTS = 12
SEEDS = [int(seed) for seed in os.environ.get("SOAK_SEEDS", "1,2,3").split(",")]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fault_free(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    with cluster(
        zygote, tmp_path_factory.mktemp("fault-free"), max_workers=1, EPOCHS=str(EPOCHS), MICRO="1"
    ) as alone:
        alone.start(0)
        (result,) = alone.finish(0)
    return str(result["digest"])


@pytest.mark.parametrize("seed", SEEDS)
def test_run_with_scheduled_faults_ends_like_a_fault_free_run(
    zygote: Zygote, tmp_path: Path, fault_free: str, seed: int
) -> None:
    schedule = random.Random(seed)
    with cluster(zygote, tmp_path, join_grace_ms=500, EPOCHS=str(EPOCHS), MICRO="1") as running:
        living = [0, 1, 2]
        for index in living:
            running.start(index)
        with running.held():
            running.wait_steps(5)
            for _ in range(FAULTS):
                living = _strike(running, schedule, living)
                target = running.steps() + schedule.randint(1, 4)
                eventually(
                    lambda goal=target: running.steps() >= goal, f"step {target} under seed {seed}"
                )
        results = running.finish(*living, may_end_well=True)
    assert {r["digest"] for r in results} == {fault_free}, f"seed {seed}"
    verdict = audit(running.records)
    assert len(verdict.epochs) == EPOCHS
    assert all(epoch.exactly_once for epoch in verdict.epochs), f"seed {seed}: {verdict}"


def _strike(running: Cluster, schedule: random.Random, living: list[int]) -> list[int]:
    """Causes one fault. Returns the workers that are left, including new ones."""
    fault = schedule.choice(["kill", "kill", "kill two", "drain", "pause", "coordinator", "join"])
    newcomer = max(running.workers) + 1
    victim = schedule.choice(living)
    if fault in ("kill", "drain") and len(living) > 1:
        living = [i for i in living if i != victim]
        _await_state(running, living)
        running.signal(victim, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
    elif fault == "kill two" and len(living) > 2:
        pair = schedule.sample(living, 2)
        living = [i for i in living if i not in pair]
        _await_state(running, living)
        for index in pair:
            running.signal(index, signal.SIGKILL)
    elif fault == "pause":
        running.signal(victim, signal.SIGSTOP)
        running.signal(victim, signal.SIGCONT)
    elif fault == "coordinator":
        running.restart_coordinator()
    if len(living) < 3 and schedule.random() < 0.7:
        running.start(newcomer)
        living = [*living, newcomer]
    return living


def _await_state(running: Cluster, left: list[int]) -> None:
    """Waits until at least one remaining worker has the run's state. If all workers with the state
    die, the run is lost, and fails with an error."""
    members = {running.members[index] for index in left}

    def one_has_it() -> bool:
        return any(
            m.member_id in members and m.rank >= 0 and m.progress.step > 0
            for m in running.job().members
        )

    eventually(one_has_it, "one that has the state")
