"""Health checks of a machine, run on this one and with the faults that they look for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal.launcher.machines import checks
from shoal.launcher.machines.health import check_clock, check_machine, failures_text
from torch.overrides import TorchFunctionMode


class OneWrongElement(TorchFunctionMode):
    """Arithmetic in which one element of each matrix product of floats is wrong, and one of each
    copy."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("matmul", "__matmul__") and result.dtype == torch.float32:
            result[717, 3] += 1
        if func.__name__ == "clone":
            result[-1] ^= 1
        return result


def test_a_processor_that_computes_one_element_wrong_is_found() -> None:
    assert "8 products" in checks.matrix()
    with (
        OneWrongElement(),
        pytest.raises(checks.Failed, match=r"wrong in 1 rows, first in row 717"),
    ):
        checks.matrix()


def test_device_that_returns_different_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked function gets the CPU as its device. tests/gpu/test_health.py checks real
    GPUs."""
    monkeypatch.setattr(checks, "_COPY_BYTES", 8 << 20)
    assert checks.gpu_memory("cpu") == "8 MiB copied to the device and back"
    with OneWrongElement(), pytest.raises(checks.Failed, match="differs from its original"):
        checks.gpu_memory("cpu")


def test_a_wrong_sum_over_gpus_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL needs GPUs, so the sums of a stand-in are checked."""

    def all_reduce(tensors: Sequence[torch.Tensor]) -> None:
        total = torch.stack(list(tensors)).sum(0)
        for tensor in tensors:
            tensor.copy_(total)
        tensors[2][77] += wrong

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    wrong = 0.0
    assert checks.nccl(["cpu"] * 3) == "summed over 3 GPUs"
    wrong = 0.5
    with pytest.raises(checks.Failed, match="the sum over 3 GPUs is wrong on cpu"):
        checks.nccl(["cpu"] * 3)


def test_each_gpu_is_checked_and_nccl_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda.nccl, "is_available", lambda tensors: True)
    monkeypatch.setattr(torch, "empty", lambda *_, device: device)
    assert [name for name, _ in checks.checks("/tmp")] == [
        *("disk", "memory", "matrix product"),
        *("matrix product on cuda:0", "memory of cuda:0"),
        *("matrix product on cuda:1", "memory of cuda:1"),
        "NCCL",
    ]


def test_disk_that_returns_different_data_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "MB/s written" in checks.disk(str(tmp_path))

    def corrupt(descriptor: int, *_: int) -> None:  # called between writing and reading
        os.pwrite(descriptor, b"\x00", (5 << 20) + 17)

    monkeypatch.setattr(os, "posix_fadvise", corrupt)
    with pytest.raises(checks.Failed, match=r"MiB 5 of a file differs"):
        checks.disk(str(tmp_path))


def test_checks_of_this_machine_pass_and_report_their_measurements() -> None:
    results = asyncio.run(check_machine())
    assert [result.name for result in results][:3] == ["disk", "memory", "matrix product"]
    assert failures_text(results) == ""
    assert all(result.detail for result in results)


def test_a_file_that_cannot_be_written_is_a_failure_with_the_systems_reason() -> None:
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "import asyncio\n"
        "from shoal.launcher.machines.health import check_machine, failures_text\n"
        "print(failures_text(asyncio.run(check_machine())))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", limited], capture_output=True, text=True, check=True, timeout=200
    )
    assert ended.stdout.strip() == "disk: [Errno 27] File too large"


def test_missing_temporary_directory_is_a_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    results = asyncio.run(check_machine())
    assert [result.name for result in results if not result.ok] == ["disk"]
    assert "No such file or directory" in failures_text(results)


def test_checks_that_do_not_finish_have_failed() -> None:
    results = asyncio.run(check_machine(timedelta(milliseconds=1)))
    assert failures_text(results) == (
        "all checks: the checks did not end within 0.001 s; 0 had completed"
    )


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "ok"),
    [(0.2, 0.1, True), (-4.9, 0.0, True), (-9.0, 0.5, False), (9.0, 5.0, True), (60.0, 1.0, False)],
)
def test_clock_may_differ_by_five_seconds_plus_the_uncertainty(
    offset_s: float, uncertainty_s: float, ok: bool
) -> None:
    result = check_clock(timedelta(seconds=offset_s), timedelta(seconds=uncertainty_s))
    assert result.ok is ok
    assert ("NTP" in result.detail) is not ok
