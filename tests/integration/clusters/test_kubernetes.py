"""Pods of docker/kubernetes, started as processes: the manifests are sufficient to train
a model."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shoal_common.exit_status import PREEMPTED

from tests.integration.clusters.pods import Pods, RunningPod, why_not
from tests.pods import FOLDER, ROOT, Pod, documents, workloads

pytestmark = pytest.mark.slow

WORKERS = ("worker-0", "worker-1", "worker-2")
SERVERS = ("ps-server-0", "ps-server-1")


def pod_of(file: str, name: str) -> Pod:
    """Returns a pod of the only workload in a file."""
    (workload,) = (
        workload for document in documents(FOLDER / file) for workload in workloads(document)
    )
    return Pod(name, workload)


@pytest.fixture
def cluster(leftover_processes: None, tmp_path: Path) -> Iterator[Callable[[str], Pods]]:
    """Creates networks of pods whose ConfigMap has the given script."""
    if (why := why_not()) is not None:
        pytest.skip(f"pods cannot be made here: {why}")
    maker = shutil.copy(ROOT / "docker/make_secrets.py", tmp_path)
    subprocess.run([sys.executable, maker], check=True, timeout=60, capture_output=True)
    with ExitStack() as stack:

        def make(script: str) -> Pods:
            (tmp_path / "train.py").write_text(script)
            services = {"redis": "redis-0", **{f"{server}.ps-server": server for server in SERVERS}}
            names = ("redis-0", "coordinator", *SERVERS, *WORKERS)
            pods = Pods(
                tmp_path,
                names,
                services=services,
                secrets=tmp_path / "secrets",
                script=tmp_path / "train.py",
            )
            return stack.enter_context(pods)

        yield make


def start_services(pods: Pods) -> RunningPod:
    redis = pods.start(pod_of("base/redis.yaml", "redis-0"))
    redis.wait_for(lambda: "Ready to accept connections" in redis.said, "Redis")
    coordinator = pods.start(pod_of("base/coordinator.yaml", "coordinator"))
    coordinator.wait_for(coordinator.is_ready, "the coordinator")
    return coordinator


def test_manifests_run_coordinator_redis_and_workers_that_train_the_script(
    cluster: Callable[[str], Pods], tmp_path: Path
) -> None:
    pods = cluster((FOLDER / "base/train.py").read_text())
    start_services(pods)
    workers = [
        pods.start(pod_of("jobset/jobset.yaml", WORKERS[0])),
        pods.start(pod_of("kubeflow/runtime.yaml", WORKERS[1])),
    ]
    assert [worker.wait() for worker in workers] == [0, 0], [worker.said for worker in workers]
    assert all("epoch 19: loss" in worker.said for worker in workers)
    assert any((tmp_path / "claim-checkpoints").iterdir())


SLOW = """
    import pathlib, shoal, time, torch

    shoal.init()
    net = torch.nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(1200, 4)), global_batch_size=6
    )
    shoal.resume("/checkpoints")
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"trains with {shoal.world_size()}", flush=True)
            if loader.global_step >= 3 and not pathlib.Path("/checkpoints/go").exists():
                time.sleep(0.2)
    shoal.save_checkpoint("/checkpoints")
"""


def test_deleted_pod_leaves_and_a_pod_on_a_dead_machine_is_replaced(
    cluster: Callable[[str], Pods], tmp_path: Path
) -> None:
    pods = cluster(textwrap.dedent(SLOW))
    start_services(pods)
    first, second = (pods.start(pod_of("jobset/jobset.yaml", name)) for name in WORKERS[:2])
    first.wait_for(lambda: "trains with 2" in first.said, "both")
    second.delete()
    assert second.wait() == PREEMPTED, second.said
    second = pods.start(pod_of("jobset/jobset.yaml", WORKERS[1]))
    second.wait_for(lambda: "trains with 2" in second.said, "the pod in its place")
    first.kill()
    third = pods.start(pod_of("jobset/jobset.yaml", WORKERS[2]))
    third.wait_for(lambda: "trains with 2" in third.said, "a pod elsewhere")
    (tmp_path / "claim-checkpoints" / "go").touch()
    assert [second.wait(), third.wait()] == [0, 0], (second.said, third.said)


ASYNCHRONOUS = """
    import shoal, torch

    shoal.init()
    net = torch.nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy="async_sgd"
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(60, 4)), batch_size=6
    )
    for epoch in loader.epochs(3):
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("done", flush=True)
"""


def test_parameter_servers_of_the_manifests_serve_the_model(
    cluster: Callable[[str], Pods], tmp_path: Path
) -> None:
    pods = cluster(textwrap.dedent(ASYNCHRONOUS))
    start_services(pods)
    servers = [pods.start(pod_of("servers/servers.yaml", name)) for name in SERVERS]
    workers = []
    for name in WORKERS[:2]:
        pod = pod_of("jobset/jobset.yaml", name)
        patched = copy.deepcopy(pod.workload)
        # as servers/kustomization.yaml says
        patched["spec"]["template"]["spec"]["containers"][0]["args"].insert(-1, "--servers=2")
        workers.append(pods.start(Pod(name, patched)))
    assert [worker.wait() for worker in workers] == [0, 0], [
        process.said for process in (*workers, *servers)
    ]
    assert all("done" in worker.said for worker in workers)
    assert all(any((tmp_path / f"claim-{name}-snapshots").iterdir()) for name in SERVERS)
