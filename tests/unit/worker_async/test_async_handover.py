"""A worker that is present from the start gets its buffers from rank 0, if that process is still
running."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shoal_worker.asynchronous import handover
from shoal_worker.asynchronous.handover import Handover
from torch import nn


def test_worker_does_not_wait_for_the_buffers_of_an_ended_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 finished the script before this worker's first step, and no generation forms."""
    monkeypatch.setattr(handover, "_GONE", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = f"127.0.0.1:{ended.getsockname()[1]}"
    job = SimpleNamespace(
        patience=timedelta(seconds=900),
        leaving=False,
        first_peer=lambda: SimpleNamespace(
            member_id="first", donor_address=address, donor_key="0" * 32
        ),
    )
    module = nn.BatchNorm1d(2)
    taking = Handover(
        cast(Any, SimpleNamespace(is_secure=False)),
        cast(Any, job),
        cast(Any, None),
        cast(Any, None),
        module,
    )
    taking.take_first_buffers()
    assert "this worker begins with its own" in caplog.text
