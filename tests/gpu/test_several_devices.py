"""Workers over NCCL, each on its own device, or all on one (GPU_SHARED=1): one dies or stalls in
the middle of an all-reduce, one joins, and large activations pass through a pipeline. The results
are bitwise those of an undisturbed run.

The rehearsal runs the same programs with small layers on the host, over Gloo.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workers.shared_gpu import SWITCH
from tests.gpu import training
from tests.gpu.devices import is_there, lease_ms, needs, needs_sharing, rehearsal, sharing
from tests.gpu.fresh import Fresh
from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually

Starter = Callable[[str], Zygote]
SCRIPT = Path(training.__file__)


@dataclass(frozen=True)
class Place:
    """The devices of the workers."""

    kind: str
    workers: int
    backend: str
    width: int
    """Width of the layers. On devices it is 1024, so that a step sums 100 MB; over loopback it is
    256."""
    shared: bool = False
    """True if all workers are on one device."""

    def settings(self, strategy: str, options: str = "{}") -> dict[str, str]:
        return {
            "STRATEGY": strategy,
            "OPTIONS": options,
            "BACKEND": self.backend,
            "WIDTH": str(self.width),
            "SHOAL_CONNECT_TIMEOUT_S": "120",
            SWITCH: str(int(self.shared)),
            **(sharing(self.kind) if self.shared else {}),
        }

    @property
    def devices(self) -> int:
        """Number of different devices that the workers use."""
        return self.workers if self.kind == "cuda" and not self.shared else 1


def _on_devices(count: int) -> Any:
    return pytest.param(
        Place("cuda", count, "nccl", 1024), id=f"cuda-{count}", marks=needs(count, nccl=True)
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            Place("cpu", 3, "gloo", 64), id="cpu-3", marks=[rehearsal, pytest.mark.matrix]
        ),
        _on_devices(2),
        _on_devices(8),
        pytest.param(
            Place("cuda", 3, "nccl", 256, shared=True), id="cuda-shared-3", marks=needs_sharing()
        ),
    ],
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    is_there(found.kind)
    return found


@pytest.fixture(scope="module")
def undisturbed(
    starter: Starter, place: Place, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Returns a function that returns the digest of the final parameters of an undisturbed run
    under a strategy."""

    @functools.cache
    def digest(strategy: str) -> str:
        settings = {**place.settings(strategy), "DETERMINISTIC": "1"}
        directory = tmp_path_factory.mktemp("undisturbed")
        lease = lease_ms(place.kind)
        with cluster(
            starter(place.kind),
            directory,
            max_workers=place.workers,
            lease_ms=lease,
            script=SCRIPT,
            **settings,
        ) as running:
            for index in range(place.workers):
                running.start(index)
            results = running.finish(*range(place.workers))
        assert len({result["device"] for result in results}) == place.devices
        (found,) = {result["digest"] for result in results}
        return str(found)

    return digest


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_worker_lost_in_the_middle_of_an_all_reduce_costs_the_others_nothing(
    starter: Starter,
    tmp_path: Path,
    place: Place,
    undisturbed: Callable[[str], str],
    strategy: str,
    action: str,
) -> None:
    """A worker that is killed or stopped while it sums gradients does not change the result of the
    others."""
    settings = {**place.settings(strategy), "DETERMINISTIC": "1"}
    with cluster(
        starter(place.kind),
        tmp_path,
        max_workers=place.workers,
        lease_ms=lease_ms(place.kind),
        script=SCRIPT,
        **settings,
    ) as running:
        for index in range(place.workers):
            running.start(
                index,
                **({"SHOAL_FAILPOINTS": f"reduction.under_way@7={action}"} if index == 1 else {}),
            )
        lost = running.workers.pop(1)
        results = running.finish(*(index for index in range(place.workers) if index != 1))
        lost.kill(signal.SIGKILL)
        assert lost.wait() == -signal.SIGKILL
    assert {result["world"] for result in results} == {place.workers - 1}
    assert {result["digest"] for result in results} == {undisturbed(strategy)}


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.soak)])
def test_repeated_steps_end_with_the_same_bits(
    starter: Starter,
    tmp_path: Path,
    place: Place,
    undisturbed: Callable[[str], str],
    strategy: str,
    times: int,
) -> None:
    """Steps that are repeated after a worker has lost its group `times` times give the same bits.
    On the host there are three steps or one, because the coordinator waits for up to 5 s when
    generations fail repeatedly."""
    steps = range(training.STEPS if place.kind == "cuda" else 3 if times == 1 else 1)
    points = [
        f"reduction.under_way@{1 + step * (times + 1) + again}=lose"
        for step in steps
        for again in range(times)
    ]
    settings = {**place.settings(strategy), "DETERMINISTIC": "1"}
    with cluster(
        starter(place.kind),
        tmp_path,
        max_workers=place.workers,
        lease_ms=lease_ms(place.kind),
        script=SCRIPT,
        **settings,
    ) as running:
        for index in range(place.workers):
            running.start(index, **({"SHOAL_FAILPOINTS": ",".join(points)} if index == 1 else {}))
        eventually(
            lambda: all(worker.ended.is_set() for worker in running.workers.values()),
            "the workers to end",
            within_s=5000,
        )
        results = running.finish(*range(place.workers))
    assert {result["world"] for result in results} == {place.workers}
    assert {result["digest"] for result in results} == {undisturbed(strategy)}


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_lost_machine_costs_the_other_one_nothing(
    starter: Starter, tmp_path: Path, place: Place, undisturbed: Callable[[str], str], strategy: str
) -> None:
    """The loss of a machine does not change the result. SHOAL_HOST and NCCL_HOSTID simulate two
    machines, and all workers of the second die at once. Under hsdp, each machine has the full
    state."""
    first, second = (
        list(range(place.workers - place.workers // 2)),
        list(range(place.workers - place.workers // 2, place.workers)),
    )
    settings = {**place.settings(strategy), "DETERMINISTIC": "1"}
    with cluster(
        starter(place.kind),
        tmp_path,
        max_workers=place.workers,
        lease_ms=lease_ms(place.kind),
        script=SCRIPT,
        **settings,
    ) as running:
        for name, indices in (("first", first), ("second", second)):
            dies = {"SHOAL_FAILPOINTS": "reduction.under_way@7=kill"} if name == "second" else {}
            for index in indices:
                running.start(index, SHOAL_HOST=name, NCCL_HOSTID=name, **dies)
        lost = [running.workers.pop(index) for index in second]
        results = running.finish(*first)
        assert [each.wait() for each in lost] == [-signal.SIGKILL] * len(lost)
    assert {result["world"] for result in results} == {len(first)}
    assert {result["digest"] for result in results} == {undisturbed(strategy)}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_joining_worker_does_not_change_the_result(
    starter: Starter, tmp_path: Path, place: Place, undisturbed: Callable[[str], str], strategy: str
) -> None:
    settings = {**place.settings(strategy), "DETERMINISTIC": "1"}
    last = place.workers - 1
    with cluster(
        starter(place.kind),
        tmp_path,
        min_workers=last,
        max_workers=place.workers,
        join_grace_ms=0,
        lease_ms=lease_ms(place.kind),
        script=SCRIPT,
        **settings,
    ) as running:
        with running.held():
            for index in range(last):
                running.start(index)
            running.wait_steps(2)
            running.start(last)
            running.wait_ranked(last)
        results = running.finish(*range(place.workers))
    assert {result["world"] for result in results} == {place.workers}
    assert {result["digest"] for result in results} == {undisturbed(strategy)}


def test_pipeline_passes_activations_of_64_mib(
    starter: Starter, tmp_path: Path, place: Place
) -> None:
    """A 1F1B pipeline with activations of 64 MiB trains as a single stage does. A micro-batch of 4
    samples has 2048 rows of 1024 float64 numbers."""
    rows = "2048" if place.kind == "cuda" else "16"
    received = []
    for stages in (1, place.workers):
        directory = tmp_path / str(stages)
        directory.mkdir()
        settings = place.settings(
            "pipeline",
            f'{{"schedule": "1f1b", "micro_batches": 4, "pipeline_parallel_size": {stages}}}',
        )
        with cluster(
            starter(place.kind),
            directory,
            max_workers=stages,
            lease_ms=lease_ms(place.kind),
            script=SCRIPT,
            TOKENS=rows,
            **settings,
        ) as running:
            for index in range(stages):
                running.start(index)
            received.append(running.finish(*range(stages)))
    (alone,), together = received
    assert alone["finite"]
    for result in together:
        assert result["checked"] == pytest.approx(alone["checked"], rel=1e-9)


@pytest.mark.slow
@rehearsal
def test_device_processes_are_new_interpreters_that_train_and_die_like_others(
    tmp_path: Path,
) -> None:
    fresh = Fresh()
    try:
        with cluster(
            fresh, tmp_path, max_workers=2, script=SCRIPT, STRATEGY="ddp", BACKEND="gloo"
        ) as running:
            running.start(0)
            running.start(1, SHOAL_FAILPOINTS="reduction.under_way@7=kill")
            assert running.workers.pop(1).wait() == -signal.SIGKILL
            (result,) = running.finish(0)
    finally:
        fresh.close()
    assert result["world"] == 1
