"""A step's compression residual counts if the step does: a run that lost steps ends bit for bit
like a run that lost none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.worker_async.async_cluster import Zygote
from tests.integration.worker_elastic.cluster import cluster

SCRIPT = Path(__file__).with_name("compressed_train.py")
VOID = "compression.halfway@6=lose"
"""No rank can have applied the step: this rank's part of the second half is missing."""
TAKEN = "reduction.completed@12=lose"
"""The other ranks may have applied the step, with this rank's part in it."""


@pytest.mark.parametrize(
    ("strategy", "compression", "micro", "faults"),
    [
        ("ddp", "sign", "0", (TAKEN, VOID)),
        pytest.param("ddp", "powersgd", "1", (TAKEN, VOID), marks=pytest.mark.matrix),
        pytest.param("ddp", "topk", "0", (TAKEN, VOID), marks=pytest.mark.matrix),
        pytest.param("ddp", "int8", "1", (TAKEN, VOID), marks=pytest.mark.matrix),
        ("zero2", "topk", "1", (TAKEN, "reduction.completed@6=lose")),
        pytest.param(
            "zero3", "sign", "0", (TAKEN, "reduction.completed@6=lose"), marks=pytest.mark.matrix
        ),
    ],
)
def test_lost_steps_leave_no_trace(
    zygote: Zygote,
    tmp_path: Path,
    strategy: str,
    compression: str,
    micro: str,
    faults: tuple[str, str],
) -> None:
    digests = []
    for name, failpoints in (("faultless", ("", "")), ("faulty", faults)):
        directory = tmp_path / name
        directory.mkdir()
        settings = {"STRATEGY": strategy, "COMPRESSION": compression, "MICRO": micro}
        with cluster(
            zygote, directory, min_workers=2, max_workers=2, script=SCRIPT, **settings
        ) as running:
            for index, failpoint in enumerate(failpoints):
                running.start(index, SHOAL_FAILPOINTS=failpoint)
            results = running.finish(0, 1)
        assert [result["steps"] for result in results] == [20, 20]
        assert all(result["lost"] >= (name == "faulty") for result in results)
        assert results[0]["generation"] == (1 if name == "faultless" else 3)
        digests += [result["digest"] for result in results]
    assert len(set(digests)) == 1
