"""Workers that share one device over Gloo: one is killed, another joins, and the result is that of
a run without faults.

Where each rank has a part or a copy of the state, the result is bitwise equal
(`deterministic=True`). Layouts that split layers sum in another order with other ranks; in float64
they agree to 1e-8 with plain torch on the host. Local SGD and compressed gradients depend on which
ranks were present, so only agreement among the ranks is checked.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_worker.torch_internals import VERSION

from tests.gpu import training
from tests.gpu.devices import is_there, lease_ms, on_host_and_device, sharing
from tests.gpu.ranks import together
from tests.integration.conftest import Shell
from tests.integration.worker_elastic.cluster import Cluster, cluster
from tests.zygote.children import Zygote

Starter = Callable[[str], Zygote]
SCRIPT = Path(training.__file__)


def run_with_a_death_and_a_joiner(running: Cluster, workers: int) -> list[dict[str, Any]]:
    """Kills worker 1 with SIGKILL while all train, and lets another worker join. Returns the
    results of the workers that are there at the end."""
    with running.held():
        for index in range(workers):
            running.start(index)
        running.wait_steps(2)
        running.signal(1, signal.SIGKILL)
        running.wait_steps(running.steps() + 1)
        running.start(workers)
        running.wait_ranked(workers)
    running.workers.pop(1).wait()
    return running.finish(*(index for index in range(workers + 1) if index != 1))


def check_ranks(results: list[dict[str, Any]], kind: str) -> None:
    """Checks the workers' results: each worker computed on its device, a death and a join have
    happened, and the results agree."""
    assert {result["device"].partition(":")[0] for result in results} == {kind}
    assert all(result["generation"] >= 3 for result in results)
    assert {result["finite"] for result in results} == {True}
    assert len({result["digest"] for result in results}) == 1


@pytest.mark.parametrize(
    ("kind", "strategy"),
    on_host_and_device(
        [("ddp",), ("zero1",), ("zero2",), ("zero3",), ("fsdp",), ("hsdp",)], quick=[]
    ),
)
def test_death_and_join_do_not_change_a_bit_of_the_result(
    starter: Starter, tmp_path: Path, kind: str, strategy: str
) -> None:
    is_there(kind)
    options = {"shard_size": 2} if strategy == "hsdp" else {}
    without = {"deterministic": True, **({"shard_size": 1} if options else {})}
    (fault_free,) = together(
        lambda: training.train(strategy, dict(without), backend="gloo"), world_size=1
    )
    settings = {
        "STRATEGY": strategy,
        "BACKEND": "gloo",
        "DETERMINISTIC": "1",
        "OPTIONS": json.dumps(options),
    }
    workers = 4 if options else 3
    with cluster(
        starter(kind),
        tmp_path,
        max_workers=workers,
        script=SCRIPT,
        lease_ms=lease_ms(kind),
        **settings,
        **sharing(kind),
    ) as running:
        results = run_with_a_death_and_a_joiner(running, workers)
    check_ranks(results, kind)
    assert results[0]["digest"] == training.digest(fault_free)


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    on_host_and_device(
        [
            ("tensor", '{"tensor_parallel_size": 2}'),
            ("pipeline", '{"pipeline_parallel_size": 2, "micro_batches": 2}'),
            ("hybrid", '{"pipeline_parallel_size": 2, "micro_batches": 2}'),
        ],
        quick=[],
    ),
)
def test_death_and_join_among_two_rank_replicas_do_not_change_the_result(
    starter: Starter, tmp_path: Path, kind: str, strategy: str, options: str
) -> None:
    is_there(kind)
    if strategy == "tensor" and VERSION < (2, 12):
        pytest.skip("strategy='tensor' needs torch 2.12 or newer")
    alone = torch.cat([value.flatten() for value in training.alone().values()]).tolist()
    settings = {"STRATEGY": strategy, "BACKEND": "gloo", "OPTIONS": options}
    with cluster(
        starter(kind),
        tmp_path,
        max_workers=4,
        script=SCRIPT,
        lease_ms=lease_ms(kind),
        **settings,
        **sharing(kind),
    ) as running:
        results = run_with_a_death_and_a_joiner(running, 4)
    check_ranks(results, kind)
    assert results[0]["parameters"] == pytest.approx(alone, abs=1e-8)


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    on_host_and_device(
        [("local_sgd", '{"sync_every": 2}'), ("ddp", '{"gradient_compression": "fp16"}')],
        quick=[("local_sgd", '{"sync_every": 2}')],
    ),
)
def test_after_a_death_and_a_join_the_ranks_agree(
    starter: Starter, tmp_path: Path, kind: str, strategy: str, options: str
) -> None:
    is_there(kind)
    settings = {"STRATEGY": strategy, "BACKEND": "gloo", "OPTIONS": options}
    with cluster(
        starter(kind), tmp_path, script=SCRIPT, lease_ms=lease_ms(kind), **settings, **sharing(kind)
    ) as running:
        results = run_with_a_death_and_a_joiner(running, 3)
    check_ranks(results, kind)


@pytest.mark.parametrize(("kind", "strategy"), on_host_and_device([("ddp",), ("zero3",)], quick=[]))
def test_session_reforms_after_its_group_is_aborted_and_loses_nothing(
    starter: Starter, tmp_path: Path, kind: str, strategy: str
) -> None:
    is_there(kind)
    (fault_free,) = together(
        lambda: training.train(strategy, {"deterministic": True}, backend="gloo"), world_size=1
    )
    settings = {"STRATEGY": strategy, "BACKEND": "gloo", "DETERMINISTIC": "1"}
    with cluster(
        starter(kind),
        tmp_path,
        max_workers=2,
        script=SCRIPT,
        lease_ms=lease_ms(kind),
        **settings,
        **sharing(kind),
    ) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS="reduction.completed@6=lose")
        results = running.finish(0, 1)
    assert {result["generation"] for result in results} == {2}
    assert {result["digest"] for result in results} == {training.digest(fault_free)}


@pytest.mark.parametrize("kind", on_host_and_device([()], quick=[]))
def test_async_sgd_with_one_worker_on_a_device_matches_one_process(shell: Shell, kind: str) -> None:
    """async_sgd with one worker trains as one process does, with gradients and values transferred
    through pinned memory."""
    is_there(kind)
    alone = torch.cat([value.flatten() for value in training.alone().values()]).tolist()
    variables = {
        "STRATEGY": "async_sgd",
        "BACKEND": "gloo",
        "OUTPUT": str(shell.directory),
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    code, out, err = shell.run(
        "run", "--standalone", "--nproc-per-node", "1", "--servers", "1", str(SCRIPT), **variables
    )
    assert code == 0, out + err
    (output,) = shell.directory.glob("*.json")
    result = json.loads(output.read_text())
    assert result["device"].partition(":")[0] == kind
    assert result["parameters"] == pytest.approx(alone, abs=1e-8)
