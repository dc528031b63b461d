"""Faults at the critical moments of a step. Every run with a fault must end bit for bit with the
parameters of the run without one, and every sample of every epoch must count exactly once."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.relay import Relay
from tests.zygote.children import Zygote, eventually

EPOCHS = 4
STEPS = 10 * EPOCHS


@pytest.fixture(scope="module")
def fault_free(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run of one worker without a fault."""
    with cluster(
        zygote, tmp_path_factory.mktemp("fault-free"), max_workers=1, EPOCHS=str(EPOCHS), MICRO="1"
    ) as alone:
        alone.start(0)
        (result,) = alone.finish(0)
    assert result["steps"] == STEPS
    return result


@pytest.fixture
def three(zygote: Zygote, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1") as running:
        yield running


def check_same_run(
    results: list[dict[str, Any]], fault_free: dict[str, Any], running: Cluster
) -> None:
    for result in results:
        assert result["steps"] == STEPS
        assert result["digest"] == fault_free["digest"]
        assert result["lr"] == fault_free["lr"]
        assert result["epochs_scheduled"] == fault_free["epochs_scheduled"]
        assert result["evaluations"] == fault_free["evaluations"]
    verdict = audit(running.records)
    assert len(verdict.epochs) == EPOCHS
    assert all(epoch.exactly_once for epoch in verdict.epochs), verdict


def test_three_workers_end_with_the_parameters_of_one(
    three: Cluster, fault_free: dict[str, Any]
) -> None:
    for index in range(3):
        three.start(index)
    results = three.finish(0, 1, 2)
    assert {r["generation"] for r in results} == {1}
    assert {r["world"] for r in results} == {3}
    check_same_run(results, fault_free, three)


@pytest.mark.parametrize(
    "failpoint",
    [
        "reduction.completed@15=kill",
        "session.before_apply@15=kill",
        "session.after_apply@15=kill",
        "session.after_commit@15=kill",
        pytest.param("session.after_commit@40=kill", marks=pytest.mark.matrix),
        "session.in_operation@3=kill",
        pytest.param("session.after_operation@4=kill", marks=pytest.mark.matrix),
        "session.before_reconcile@1=kill",
    ],
)
def test_a_worker_killed_at_any_moment_costs_the_others_nothing(
    three: Cluster, fault_free: dict[str, Any], failpoint: str
) -> None:
    three.start(0)
    three.start(1, SHOAL_FAILPOINTS=failpoint)
    three.start(2)
    results = three.finish(0, 2)
    assert {r["world"] for r in results} == {2}
    check_same_run(results, fault_free, three)


@pytest.mark.parametrize("step", [15, 20])
def test_rank_in_doubt_of_a_step_committed_by_its_peers_applies_it_too(
    three: Cluster, fault_free: dict[str, Any], step: int
) -> None:
    """Step 20 is the last of an epoch."""
    three.start(0)
    three.start(1, SHOAL_FAILPOINTS=f"step.summed@{step}=lose")
    three.start(2)
    results = three.finish(0, 1, 2)
    assert len({r["lost"] for r in results}) == 1
    check_same_run(results, fault_free, three)


def test_step_that_one_rank_never_prepared_is_aborted_on_all(
    three: Cluster, fault_free: dict[str, Any]
) -> None:
    three.start(0)
    three.start(1, SHOAL_FAILPOINTS="reduction.completed@15=lose")
    three.start(2)
    results = three.finish(0, 1, 2)
    assert [r["lost"] for r in results] == [1, 1, 1]
    check_same_run(results, fault_free, three)


def test_third_worker_finishes_after_two_are_killed_in_one_step(
    three: Cluster, fault_free: dict[str, Any]
) -> None:
    three.start(0)
    three.start(1, SHOAL_FAILPOINTS="session.before_apply@15=kill")
    three.start(2, SHOAL_FAILPOINTS="reduction.completed@16=kill")
    check_same_run(three.finish(0), fault_free, three)


def test_worker_killed_while_the_others_re_form_is_excluded_too(
    three: Cluster, fault_free: dict[str, Any]
) -> None:
    three.start(0)
    three.start(1, SHOAL_FAILPOINTS="session.after_apply@15=kill")
    three.start(2, SHOAL_FAILPOINTS="session.before_reconcile@2=kill")
    check_same_run(three.finish(0), fault_free, three)


def test_replacement_receives_the_state_from_its_peers_and_continues(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1") as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(1)
            running.signal(1, signal.SIGKILL)
            running.start(3)  # makes the world full again, so there is no wait for the join grace
            running.wait_ranked(3)
        results = running.finish(0, 2, 3)
        assert {r["world"] for r in results} == {3}
        check_same_run(results, fault_free, running)


@pytest.mark.parametrize(
    ("joiner", "donor"),
    [
        pytest.param("transfer.before_request@1=kill", "", marks=pytest.mark.matrix),
        ("", "transfer.before_serving@1=kill"),
        ("session.at_boundary@1=kill", ""),
    ],
)
def test_failed_join_leaves_the_others_unharmed(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any], joiner: str, donor: str
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, join_grace_ms=0, EPOCHS=str(EPOCHS), MICRO="1"
    ) as running:
        with running.held():
            running.start(0)
            running.start(1, SHOAL_FAILPOINTS=donor)
            running.wait_steps(1)
            running.start(2, SHOAL_FAILPOINTS=joiner)
            victim = 1 if donor else 2
            eventually(running.workers[victim].ended.is_set, "the failpoint")
        survivors = (0, 2) if donor else (0, 1)
        check_same_run(running.finish(*survivors), fault_free, running)


@pytest.mark.parametrize(
    "failpoint", ["session.before_apply@15=stop", "session.after_commit@20=hang"]
)
def test_hung_worker_is_evicted_and_the_others_continue(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any], failpoint: str
) -> None:
    # A stopped process loses its lease; a process whose heartbeats continue is found by its peers'
    # timeout.
    limits = {
        "lease_ms": 3000,
        "stall_timeout_ms": 2000,
        "SHOAL_COLLECTIVE_TIMEOUT_S": "60" if failpoint.endswith("stop") else "2",
    }
    with cluster(zygote, tmp_path, **limits, EPOCHS=str(EPOCHS), MICRO="1") as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS=failpoint)
        running.start(2)
        hung = running.workers.pop(1)
        results = running.finish(0, 2)
        running.workers[1] = hung
        check_same_run(results, fault_free, running)


def test_sigterm_drains_a_worker_at_a_step_boundary_without_a_lost_step(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1") as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(1)
            running.signal(1, signal.SIGTERM)
            assert running.workers.pop(1).wait() == 0
        results = running.finish(0, 2)
        assert [r["lost"] for r in results] == [0, 0]
        assert {r["world"] for r in results} == {2}
        check_same_run(results, fault_free, running)


def test_training_continues_without_the_coordinator_and_membership_updates_on_its_return(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS), MICRO="1") as running:
        with running.held():
            for index in range(3):
                running.start(index)
            running.wait_steps(1)
            before = running.job()
            running.restart_coordinator()
            eventually(
                lambda: running.steps() > before.members[0].progress.step + 1,
                "steps after the restart",
            )
            assert running.job().generation.number == before.generation.number
            running.signal(2, signal.SIGKILL)
            eventually(
                lambda: running.job().generation.number > before.generation.number,
                "the next generation",
            )
        results = running.finish(0, 1)
        assert {r["generation"] > before.generation.number for r in results} == {True}
        check_same_run(results, fault_free, running)


def test_a_network_that_drops_all_connections_to_the_coordinator_costs_nobody_its_place(
    three: Cluster, fault_free: dict[str, Any]
) -> None:
    with Relay(three.address) as relay:
        with three.held():
            for index in range(3):
                three.start(index, SHOAL_COORDINATOR=relay.address)
            three.wait_steps(1)
            assert relay.drop() == 3
            eventually(lambda: relay.connections == 3, "the workers to come back")
            before = three.steps()
            eventually(lambda: three.steps() > before + 1, "steps after the cut")
        results = three.finish(0, 1, 2)
        assert {r["generation"] for r in results} == {1}
        check_same_run(results, fault_free, three)


def test_a_stopped_job_ends_its_loops_at_one_step_boundary(three: Cluster) -> None:
    with three.held():
        for index in range(3):
            three.start(index)
        three.wait_steps(2)
        three.client.stop_job("job", reason="test")
        eventually(
            lambda: all(w.ended.is_set() for w in three.workers.values()), "the workers' end"
        )
    results = three.finish(0, 1, 2)
    assert len({r["steps"] for r in results}) == 1
    assert len({r["digest"] for r in results}) == 1
    assert results[0]["steps"] < STEPS


def test_survivors_agree_and_every_sample_counts_once_without_micro_batches(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(zygote, tmp_path, EPOCHS=str(EPOCHS)) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS="reduction.completed@15=kill")
        running.start(2)
        results = running.finish(0, 2)
        assert results[0]["digest"] == results[1]["digest"]
        assert all(epoch.exactly_once for epoch in audit(running.records).epochs)


def test_a_run_resumes_from_its_checkpoint_on_another_number_of_workers(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    checkpoints = str(tmp_path / "checkpoints")
    with cluster(
        zygote, tmp_path / "first", EPOCHS="2", MICRO="1", CHECKPOINTS=checkpoints
    ) as running:
        for index in range(3):
            running.start(index)
        running.finish(0, 1, 2)
    with cluster(
        zygote,
        tmp_path / "second",
        max_workers=2,
        EPOCHS=str(EPOCHS),
        MICRO="1",
        CHECKPOINTS=checkpoints,
    ) as running:
        for index in range(2):
            running.start(index)
        results = running.finish(0, 1)
    assert {r["digest"] for r in results} == {fault_free["digest"]}
    assert {tuple(r["lr"]) for r in results} == {tuple(fault_free["lr"])}


def test_replacement_starts_from_the_checkpoint_when_all_holders_of_the_state_are_gone(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    with cluster(
        zygote,
        tmp_path,
        max_workers=1,
        lease_ms=2000,
        EPOCHS=str(EPOCHS),
        MICRO="1",
        CHECKPOINTS=str(tmp_path / "checkpoints"),
    ) as running:
        running.start(0, SHOAL_FAILPOINTS="session.after_commit@25=kill")
        eventually(running.workers[0].ended.is_set, "the first worker's death")
        running.start(1)
        (result,) = running.finish(1)
        assert result["digest"] == fault_free["digest"]


def test_replacements_of_all_workers_resume_together_from_the_last_step_of_an_epoch(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    """The checkpoint was saved within the loop, so the operations at the end of the epoch, in which
    all ranks take part, are still to be done."""
    settings = {"MICRO": "1", "CHECKPOINTS": str(tmp_path / "checkpoints"), "SAVE_EVERY": "20"}
    with cluster(
        zygote,
        tmp_path,
        max_workers=2,
        min_workers=2,
        lease_ms=2000,
        EPOCHS=str(EPOCHS),
        **settings,
    ) as running:
        for index in (0, 1):
            running.start(index, SHOAL_FAILPOINTS="session.after_commit@25=hang")
        eventually((tmp_path / "checkpoints" / "step-20").is_dir, "the checkpoint")
        for index in (0, 1):
            running.signal(index, signal.SIGKILL)
        for index in (2, 3):
            running.start(index)
        results = running.finish(2, 3)
    assert {r["digest"] for r in results} == {fault_free["digest"]}
    assert {r["epochs_scheduled"] for r in results} == {fault_free["epochs_scheduled"]}


def test_replacement_without_state_may_restart_at_step_0_if_allowed_and_reports_it(
    zygote: Zygote, tmp_path: Path, fault_free: dict[str, Any]
) -> None:
    """The replacement repeats the full run from the initial weights."""
    with cluster(
        zygote, tmp_path, max_workers=1, lease_ms=2000, EPOCHS=str(EPOCHS), MICRO="1"
    ) as running:
        running.start(0, SHOAL_FAILPOINTS="session.after_commit@25=kill")
        eventually(running.workers[0].ended.is_set, "the first worker's death")
        running.start(1, SHOAL_ALLOW_RESTART_FROM_SCRATCH="1")
        (result,) = running.finish(1)
        assert (
            "training restarts at step 0 (SHOAL_ALLOW_RESTART_FROM_SCRATCH is set)"
            in running.workers[1].said()
        )
        check_same_run([result], fault_free, running)
        lines = [
            json.loads(line)
            for line in (running.records / f"{running.members[1]}.jsonl").read_text().splitlines()
        ]
        committed = [(line["epoch"], line["step"]) for line in lines if line["kind"] == "committed"]
        assert (committed[0], len(committed)) == ((0, 0), STEPS)


def test_script_that_exits_with_a_nonzero_status_has_failed(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, shoal\nshoal.init()\nsys.exit(eval(os.environ['STATUS']))")
    with cluster(zygote, tmp_path, script=script) as running:
        for index, status in enumerate(("3", "0", "None")):
            running.start(index, STATUS=status)
        running.finish(1, 2, may_end_well=True)
        assert running.workers[0].wait() == 3
        events = running.client.watch_events("job")
        endings = {
            event.member_id: event.attributes["ending"]
            for event in events
            if event.kind in ("member_lost", "member_left")
        }
        assert [endings[running.members[index]] for index in range(3)] == [
            "script_failed",
            "finished",
            "finished",
        ]
