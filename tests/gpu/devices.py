"""The device of a test in this folder: the host, in every run of the tests, or CUDA devices (make
test-gpu).

On the host, the same programs run; only `shoal.device()` differs. These cases are skipped on a
machine with a GPU, unless the devices are hidden (`CUDA_VISIBLE_DEVICES=`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.workers.shared_gpu import SWITCH, first_visible

SHARED = os.environ.get(SWITCH) == "1"
"""True if NCCL ranks may share the first GPU: GPU_SHARED=1 make test-gpu."""
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs(devices: int, *, nccl: bool = False) -> list[pytest.MarkDecorator]:
    """Returns the marks of tests that need this many CUDA devices. `nccl`: True if they use
    NCCL."""
    missing = f"{devices} CUDA device(s) are needed, and torch sees {COUNT} here"
    if nccl and devices <= COUNT and not dist.is_nccl_available():
        missing = "this torch is built without NCCL"
    absent = devices > COUNT or (nccl and not dist.is_nccl_available())
    return [pytest.mark.gpu, pytest.mark.skipif(absent, reason=missing)]


def needs_sharing() -> list[pytest.MarkDecorator]:
    """Returns the marks of tests in which several NCCL ranks share one device, which requires
    GPU_SHARED=1."""
    return [
        *needs(1, nccl=True),
        pytest.mark.skipif(not SHARED, reason=f"NCCL ranks share a GPU only with {SWITCH}=1"),
    ]


rehearsal = pytest.mark.skipif(
    COUNT > 0, reason="rehearsals need the host, but shoal.device() is a CUDA device here"
)


def places(*, quick: bool) -> list[Any]:
    """Returns the cases of a test with a few workers as pairs of kind and backend: on the host, and
    with all workers on one device, over Gloo and over NCCL. If `quick`, the host's case is in every
    run of the tests, otherwise only in `make parity`."""
    return [
        pytest.param(
            "cpu", "gloo", id="cpu", marks=[rehearsal, *([] if quick else [pytest.mark.matrix])]
        ),
        pytest.param("cuda", "gloo", id="cuda", marks=needs(1)),
        pytest.param("cuda", "nccl", id="cuda-shared", marks=needs_sharing()),
    ]


def on_host_and_device(
    cases: Sequence[tuple[Any, ...]], *, quick: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Returns the cases twice, preceded by "cpu" or "cuda". On the host, the `quick` ones are in
    every run of the tests, the others only in `make parity`."""

    def name(case: tuple[Any, ...]) -> str:
        return "-".join(str(part) for part in case)

    host = [
        pytest.param(
            "cpu",
            *case,
            id=name(("cpu", *case)),
            marks=[rehearsal, *([] if case in quick else [pytest.mark.matrix])],
        )
        for case in cases
    ]
    device = [
        pytest.param("cuda", *case, id=name(("cuda", *case)), marks=needs(1)) for case in cases
    ]
    return [*host, *device]


def sharing(kind: str) -> dict[str, str]:
    """Returns environment variables that make workers share one device: the first that this process
    may use."""
    return {"CUDA_VISIBLE_DEVICES": first_visible()} if kind == "cuda" else {}


def lease_ms(kind: str) -> int:
    """Returns the lease of a worker. The first use of CUDA blocks Python, and with it the
    heartbeats, for seconds."""
    return 20_000 if kind == "cuda" else 3000


def is_there(kind: str) -> None:
    """Fails if the ranks would compute on another kind of device than the test's name says."""
    assert kind == ("cuda" if COUNT else "cpu")
