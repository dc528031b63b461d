"""The scripts of docs/clusters/slurm.md on a SLURM of three machines: jobs that succeed, and jobs
that SLURM cancels, preempts or requeues."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_common.exit_status import PREEMPTED
from shoal_worker.checkpoint.files import latest, read_checkpoint
from shoal_worker.data.record import audit

from tests.integration.clusters.slurm import Job, Slurm, why_not

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs/clusters/slurm.md"
SCRIPT, SCRIPT_WITH_SERVERS = re.findall(
    r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
)
NODES = ("n1", "n2", "n3")
STEPS = 240
TRAINING = """
    import json, os, pathlib, shoal, socket, time, torch
    from torch import nn

    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 0.01), strategy="zero2"
    )
    rows = torch.randn(480, 4, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(rows), global_batch_size=6)
    shoal.resume("checkpoints")
    began_at = None
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            began_at = loader.global_step if began_at is None else began_at
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            shoal.save_checkpoint("checkpoints", every_steps=60)
            pathlib.Path(f"trains-{socket.gethostname()}-{shoal.world_size()}").touch()
            if loader.global_step >= 3 and not pathlib.Path("go").exists():
                time.sleep(0.2)  # a slow step: what happens is to happen while steps go on
    shoal.save_checkpoint("checkpoints")
    job = os.environ["SHOAL_JOB_ID"]
    pathlib.Path(f"ended-{job}-{shoal.rank()}").write_text(
        json.dumps([began_at, loader.global_step, socket.gethostname()])
    )
"""
ASYNCHRONOUS = """
    import json, pathlib, shoal, socket, torch
    from torch import nn

    shoal.init()
    net = nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd"
    )
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(rows), batch_size=6)
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pathlib.Path(f"ended-{socket.gethostname()}").touch()
"""


@pytest.fixture(scope="module")
def slurm(leftover_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (why := why_not()) is not None:
        pytest.skip(f"SLURM cannot run here: {why}")
    with Slurm(tmp_path_factory.mktemp("slurm"), NODES) as cluster:
        yield cluster


class Training:
    """One job that runs a script of the page."""

    def __init__(self, slurm: Slurm, directory: Path, script: str = SCRIPT) -> None:
        self.directory = directory
        (directory / "train.py").write_text(textwrap.dedent(TRAINING))
        self.job = slurm.submit(
            script, directory, f"--export=ALL,SHOAL_RECORD_DIR={directory / 'records'}"
        )

    def wait_all_train(self, world: int = 3) -> None:
        self.job.wait_for(
            lambda: len(list(self.directory.glob(f"trains-*-{world}"))) == world,
            f"{world} machines to train together",
        )

    def release(self) -> None:
        """Lets all further steps run at full speed."""
        (self.directory / "go").touch()

    def ended(self, job_id: str) -> list[list[object]]:
        """Returns the first step, the last step and the machine of each rank of a run."""
        return [
            json.loads(path.read_text())
            for path in sorted(self.directory.glob(f"ended-{job_id}-*"))
        ]

    def finish(self) -> None:
        self.release()
        self.job.wait_completed()
        verdict = audit(self.directory / "records")
        assert len(verdict.epochs) == 3
        assert verdict.exactly_once, verdict


@pytest.fixture
def training(slurm: Slurm, tmp_path: Path) -> Iterator[Training]:
    made = Training(slurm, tmp_path)
    yield made
    made.job.cancel()


def resumes_where_it_stopped(training: Training, job: Job) -> None:
    """Checks that the run ended by SIGTERM left a complete checkpoint, and that the requeued job
    resumes from it as a new run."""
    first, second = f"slurm-{job.number}", f"slurm-{job.number}-1"
    job.start_again_now()
    stopped = training.ended(first)
    assert len(stopped) == 3, job.said
    (stopped_at,) = {step for _, step, _ in stopped}
    found = latest(training.directory / "checkpoints")
    assert found is not None
    read_checkpoint(found)
    assert int(found.name.removeprefix("step-")) >= stopped_at
    assert job.said.count(f"Exited with exit code {PREEMPTED}") >= 1, job.said
    training.finish()
    assert "coordinator at n1:" in job.said
    assert [received[:2] for received in training.ended(second)] == [[stopped_at, STEPS]] * 3, (
        job.said
    )


def test_the_pages_script_trains_to_its_end_on_three_machines(training: Training) -> None:
    training.wait_all_train()
    training.finish()
    received = training.ended(f"slurm-{training.job.number}")
    assert [end[:2] for end in received] == [[0, STEPS]] * 3
    assert {end[2] for end in received} == set(NODES)
    assert re.search(
        rf"coordinator at n\d:\d+ for job slurm-{training.job.number}, 1:3 machines \(SLURM\)",
        training.job.said,
    )


def test_sigterm_to_the_steps_leaves_a_complete_checkpoint_and_requeues_the_job(
    slurm: Slurm, training: Training
) -> None:
    training.wait_all_train()
    slurm.ask("scancel", "--signal=TERM", training.job.number)
    resumes_where_it_stopped(training, training.job)


@pytest.mark.matrix
def test_requeued_job_resumes_from_its_checkpoint_as_a_new_run(
    slurm: Slurm, training: Training
) -> None:
    training.wait_all_train()
    slurm.ask("scontrol", "requeue", training.job.number)
    resumes_where_it_stopped(training, training.job)


@pytest.mark.matrix
def test_preempted_job_resumes_when_the_other_one_is_done(
    slurm: Slurm, training: Training, tmp_path: Path
) -> None:
    training.wait_all_train()
    (other := tmp_path / "other").mkdir()
    urgent = slurm.submit(
        "#!/bin/bash\ntrue\n", other, "--partition=high", "--nodes=3", "--exclusive"
    )
    urgent.wait_completed()
    resumes_where_it_stopped(training, training.job)


def test_training_continues_when_a_machine_is_drained_and_another_dies(
    slurm: Slurm, training: Training
) -> None:
    training.wait_all_train()
    slurm.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    slurm.kill_node("n3")
    try:
        training.wait_all_train(2)
        training.finish()
        assert {end[2] for end in training.ended(f"slurm-{training.job.number}")} == {"n1", "n2"}
    finally:
        slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
        slurm.start_node("n3")


@pytest.mark.matrix
def test_parameter_servers_and_workers_run_in_one_step(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train_async.py").write_text(textwrap.dedent(ASYNCHRONOUS))
    job = slurm.submit(
        SCRIPT_WITH_SERVERS, tmp_path, f"--export=ALL,SHOAL_RECORD_DIR={tmp_path / 'records'}"
    )
    try:
        job.wait_completed()
    finally:
        job.cancel()
    assert len(list(tmp_path.glob("ended-n*"))) == 2, job.said
    assert len(list((tmp_path / "servers" / job.number).iterdir())) == 2
    verdict = audit(tmp_path / "records")
    assert verdict.exactly_once, verdict
