"""Health checks of the GPUs of this machine."""

from __future__ import annotations

import asyncio

import pytest
import torch
from shoal.launcher.machines.health import check_machine, failures_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_each_gpu_computes_and_copies_correctly_and_nccl_sums_over_all() -> None:
    results = asyncio.run(check_machine())
    assert failures_text(results) == ""
    names = {result.name for result in results}
    for index in range(torch.cuda.device_count()):
        assert {f"matrix product on cuda:{index}", f"memory of cuda:{index}"} <= names
    assert "NCCL" in names
