"""A job id that is used repeatedly: launchers of several machines (here all on one) start the same
command again after its end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import PreconditionError
from shoal_common.exit_status import PREEMPTED
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

Shell = Any  # of tests/integration/conftest.py
Command = Any

REPOSITORY = Path(__file__).parents[3]
PLAIN = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"


def job(endpoint: str, job_id: str = "default") -> pb.GetJobResponse:
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        return client.get_job(job_id)


def endings(endpoint: str, job_id: str = "default") -> list[str]:
    """Returns the endings of the job's runs, the newest last."""
    found = job(endpoint, job_id)
    names = [
        pb.JobEnding.Name(each).removeprefix("JOB_ENDING_").lower()
        for each in (*(p.ending for p in found.past_runs), found.ending)
    ]
    assert [past.run.number for past in found.past_runs] == list(range(1, len(names)))
    return names


def start_elastic(
    shell: Shell, endpoint: str, worker: Path, until: str, *flags: str, machines: int = 2
) -> list[Command]:
    """Starts `machines` launchers with a worker each and waits until all have a rank."""
    command = (
        "run",
        "--nnodes",
        f"{machines}",
        "--rdzv-endpoint",
        endpoint,
        *flags,
        worker,
        shell.directory / until,
    )
    nodes = [shell.start(*command) for _ in range(machines)]
    for node in nodes:
        node.wait_for(lambda node=node: f" of {machines}\n" in node.stdout, "its rank")
    return nodes


def test_restarted_multi_machine_command_trains_again(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    for number in (1, 2):
        nodes = start_elastic(shell, endpoint, elastic_worker, f"finish-{number}")
        (shell.directory / f"finish-{number}").touch()
        assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
        received = "".join(node.stderr for node in nodes)
        assert (
            f"run {number} of job default began; run {number - 1} was completed" in received
        ) == (number > 1), received
    assert endings(endpoint) == ["completed"] * 2


def test_restarted_multi_machine_plain_script_runs_again(shell: Shell, endpoint: str) -> None:
    script = shell.script(PLAIN)
    for _ in range(2):
        nodes = [
            shell.start("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, script)
            for _ in range(2)
        ]
        assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
        assert sorted(line for node in nodes for line in node.stdout.splitlines()) == [
            "[0]: rank 0 of 2",
            "[1]: rank 1 of 2",
        ]
    assert endings(endpoint) == ["completed"] * 2


def test_second_run_does_not_start_beside_a_running_plain_script(
    shell: Shell, endpoint: str
) -> None:
    script = shell.script(
        "import pathlib, time\nprint('here', flush=True)\nwhile not pathlib.Path('go').exists():\n "
        "   time.sleep(0.05)\n"
    )
    first = shell.start("run", "--nnodes", "1", "--rdzv-endpoint", endpoint, script)
    first.wait_for(lambda: "here" in first.stdout, "its script")
    status, _, err = shell.run(
        "run", "--nnodes", "1", "--rdzv-endpoint", endpoint, "--run", "2", script
    )
    assert status == 1
    assert re.search(
        r"run 1 of job default is still in progress with 1 launchers \(\S+\); stop it before "
        r"starting run 2, or omit --run to join it",
        err,
    ), err
    (shell.directory / "go").touch()
    assert first.wait() == 0, first.stderr
    assert endings(endpoint) == ["completed"]


@pytest.mark.slow
@pytest.mark.fresh
def test_ranks_that_cannot_hold_the_model_are_refused_in_each_run(
    shell: Shell, endpoint: str
) -> None:
    """This also applies to later runs: the check considers the ranks that the run begins with, not
    those that remain after a death."""
    script = shell.script(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import shoal\nfrom tests.unit.worker_strategies import mesh_models as models\nnet = "
        "models.make()\n"
        "optimizer = models.OPTIMIZERS['adamw'](net.parameters())\n"
        "model, optimizer = shoal.as_distributed(net, optimizer, strategy='tensor', "
        "tensor_parallel_size=2)\n"
        "for x, y in shoal.ElasticDataLoader(models.data(), global_batch_size=models.BATCH):\n    "
        "model.train_step(x, y, models.loss_of)\n"
    )
    for number in (1, 2):
        status, _, err = shell.run("run", "--nnodes", "1", "--rdzv-endpoint", endpoint, script)
        assert status == 1
        assert "1 rank(s) are fewer than the 2 that one replica needs" in err, (number, err)
    assert endings(endpoint) == ["failed", "failed"]


def test_restarted_failed_job_is_a_new_run(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    (shell.directory / "raise-1").touch()
    assert [node.wait() for node in nodes] == [1, 1]
    (shell.directory / "raise-1").unlink()
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    (shell.directory / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert "run 2 of job default began; run 1 failed" in nodes[0].stderr + nodes[1].stderr
    assert endings(endpoint) == ["failed", "completed"]


def test_restarted_preempted_run_resumes(shell: Shell, endpoint: str, elastic_worker: Path) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [PREEMPTED, PREEMPTED]
    before = job(endpoint)
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    assert job(endpoint).run == before.run
    assert job(endpoint).generation.number > before.generation.number
    (shell.directory / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    assert endings(endpoint) == ["completed"]


@pytest.mark.slow
@pytest.mark.fresh
def test_launcher_that_arrives_after_the_end_says_so_while_it_waits_for_the_others(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    (shell.directory / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    flags = ("run", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    late = shell.start(*flags, "--rdzv-conf", "join_timeout=12", elastic_worker, "finish")
    assert late.wait() == 1
    assert re.search(
        r"run 2 of job default began; run 1 was completed \d+ s ago \(member \S+ reached the end "
        r"of its script\); with --run 1, no run would have begun",
        late.stderr,
    )
    waiting = (
        r"up to \d s longer for the launchers of run 2 of job default: 1 of at least 2 have "
        r"joined \(\S+\), 1 are missing; run 1 was"
    )
    assert re.search(waiting, late.stderr), late.stderr
    assert "2 launchers for run 2 of job default did not all join within 12 s" in late.stderr


def test_launcher_with_an_assigned_run_does_not_start_another(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    """For example, a scheduler requeues and restarts a launcher after the others have finished."""
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish", "--run", "1")
    (shell.directory / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    requeued = shell.start(
        "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--run", "1", elastic_worker, "finish"
    )
    assert requeued.wait() == 0
    assert "run 1 of job default was completed" in requeued.stderr
    assert "so there is nothing to do" in requeued.stderr
    assert requeued.stdout == ""
    assert endings(endpoint) == ["completed"]
    status, _, err = shell.run(
        "run", "--rdzv-endpoint", endpoint, "--run", "7", elastic_worker, "finish"
    )
    assert status == 1
    assert "job default has no run 7: the newest one is run 1, and the next will be run 2" in err


def test_resume_continues_a_failed_run_but_not_a_completed_one(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish", "--resume")
    (shell.directory / "raise-0").touch()
    assert [node.wait() for node in nodes] == [1, 1]
    (shell.directory / "raise-0").unlink()
    generation = job(endpoint).generation.number
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish", "--resume")
    assert job(endpoint).run.number == 1
    assert job(endpoint).generation.number > generation
    (shell.directory / "finish").touch()
    assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    status, _, err = shell.run(
        "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--resume", elastic_worker, "finish"
    )
    assert status == 1
    assert "run 1 of job default has completed" in err
    assert "there is nothing to resume; start without --resume to begin run 2" in err


def test_machine_restarted_early_waits_for_the_others_to_leave(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish")
    stopped = next(
        process
        for process in nodes[1].family()
        if "elastic_worker" in " ".join(process.cmdline()) and process.pid != nodes[1].process.pid
    )
    os.kill(stopped.pid, signal.SIGSTOP)
    (shell.directory / "finish").touch()
    assert nodes[0].wait() == 0, nodes[0].stderr
    early = shell.start(
        "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, elastic_worker, "finish"
    )
    early.wait_for(
        lambda: "run 1 of job default was completed" in early.stderr,
        "its word on whom it waits for",
    )
    assert "1 of its members have not left yet" in early.stderr
    os.kill(stopped.pid, signal.SIGCONT)
    assert nodes[1].wait() == 0, nodes[1].stderr
    other = shell.start(
        "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, elastic_worker, "finish"
    )
    assert [early.wait(), other.wait()] == [0, 0], [early.stderr, other.stderr]
    assert endings(endpoint) == ["completed", "completed"]


def compose_command(endpoint: str, script: Path, *arguments: object) -> list[str]:
    """Returns the workers' command from compose.yaml, with this test's coordinator and script."""
    # the default of each variable
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (REPOSITORY / "compose.yaml").read_text())
    command = yaml.safe_load(text)["services"]["worker"]["command"]
    assert command[0] == "shoal"
    assert command[-1] == "train.py"
    replaced = [part.replace("coordinator:7000", endpoint) for part in command[1:-1]]
    assert replaced != command[1:-1]
    return [*replaced, str(script), *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.fresh
def test_compose_workers_train_again_and_return_in_a_new_run_after_a_failure(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    """Two containers finish a run. Then a run fails, `restart: on-failure` starts both again, and
    the new run finishes."""

    def start(until: str) -> list[Command]:
        command = compose_command(endpoint, elastic_worker, shell.directory / until)
        workers = [shell.start(*command) for _ in range(2)]
        for worker in workers:
            worker.wait_for(lambda worker=worker: " of 2\n" in worker.stdout, "a world of two")
        return workers

    workers = start("first")
    (shell.directory / "first").touch()
    assert [worker.wait() for worker in workers] == [0, 0], [worker.stderr for worker in workers]
    workers = start("second")
    (shell.directory / "raise-1").touch()
    assert [worker.wait() for worker in workers] == [1, 1]
    (shell.directory / "raise-1").unlink()
    workers = start("second")
    (shell.directory / "second").touch()
    assert [worker.wait() for worker in workers] == [0, 0], [worker.stderr for worker in workers]
    assert endings(endpoint, "train") == ["completed", "failed", "completed"]


def test_a_late_worker_of_an_old_run_is_reported(
    shell: Shell, endpoint: str, elastic_worker: Path
) -> None:
    nodes = start_elastic(shell, endpoint, elastic_worker, "finish", machines=1)
    first = job(endpoint)
    (shell.directory / "finish").touch()
    assert nodes[0].wait() == 0
    shell.start("run", "--rdzv-endpoint", endpoint, elastic_worker, "finish").wait()
    with CoordinatorClient(ChannelSettings(address=endpoint)) as client:
        client.run = first.run
        for late in (
            lambda: client.report_exit("default", "somebody", exit_code=0),
            lambda: client.stop_job("default"),
            lambda: client.lease_batches(
                "default", "somebody", loader="train", epoch=0, batches_in_epoch=1, want=1
            ),
            lambda: client.declare_tensors(
                "default", [pb.TensorSpec(name="w", shape=[1], dtype="float32")]
            ),
            lambda: client.get_shard_map("default"),
            lambda: client.drain_member("default", rank=0),
            lambda: client.drain_server("default", "s"),
            lambda: next(
                client.join_session(
                    iter(
                        [
                            pb.MemberMessage(
                                join=pb.Join(
                                    job_id="default", member_id="m", host="h", pid=1, run=first.run
                                )
                            )
                        ]
                    )
                )
            ),
        ):
            with pytest.raises(
                PreconditionError,
                match=r"run 1 of job default was completed \d+ s ago \(.*\); the newest one is run "
                r"2",
            ) as received:
                late()
            assert received.value.reason == "RUN_ENDED"
        assert client.get_job("default").ending == pb.JOB_ENDING_COMPLETED
        assert {event.run for event in client.watch_events("default")} == {1}
