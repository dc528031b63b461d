"""A worker whose device fails in the middle of a step ends. Its replacement and its peers reach the
result of a run without faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shoal_common.exit_status import EVICTED

from tests.gpu import training
from tests.gpu.devices import is_there, lease_ms, places, sharing
from tests.gpu.ranks import together
from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually

Starter = Callable[[str], Zygote]
_ERROR = 1
"""Exit status of a script that raised an exception."""


@pytest.mark.parametrize("strategy", ["ddp"])
@pytest.mark.parametrize(
    ("kind", "backend", "fault", "status"),
    [
        pytest.param(*case.values, fault, status, id=f"{case.id}-{fault}", marks=case.marks)
        for fault, status in (("illegal_access", EVICTED), ("out_of_memory", _ERROR))
        for case in places(quick=True)
        if fault == "out_of_memory" or case.id != "cuda"  # over Gloo the error is the script's
    ],
)
def test_device_fault_costs_its_worker_but_no_step(
    starter: Starter,
    tmp_path: Path,
    kind: str,
    backend: str,
    fault: str,
    status: int,
    strategy: str,
) -> None:
    """A worker whose device fails is replaced without losing a step. The test replaces the worker
    as the launcher would, which does so without limit for status 75 and within `--max-restarts`
    otherwise."""
    is_there(kind)
    (fault_free,) = together(
        lambda: training.train(strategy, {"deterministic": True}, backend="gloo"), world_size=1
    )
    settings = {"STRATEGY": strategy, "BACKEND": backend, "DETERMINISTIC": "1", **sharing(kind)}
    with cluster(
        starter(kind),
        tmp_path,
        max_workers=2,
        script=Path(training.__file__),
        lease_ms=lease_ms(kind),
        **settings,
    ) as running:
        with running.held():
            running.start(0)
            running.start(1, FAULT=fault)
            failed = running.workers.pop(1)
            eventually(
                failed.ended.is_set, lambda: f"the fault; the worker's output: {failed.said()}"
            )
            assert failed.status == status, failed.said()
            running.start(2)
            running.wait_ranked(2)
        results = running.finish(0, 2)
    assert {result["device"].partition(":")[0] for result in results} == {kind}
    assert {result["world"] for result in results} == {2}
    assert {result["digest"] for result in results} == {training.digest(fault_free)}
