"""Ranks that wait for a disk in an operation may wait longer than a collective's timeout."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import CorruptDataError, DeadlineError
from shoal_worker.checkpoint.writer import CheckpointWriter, in_company, on_first
from shoal_worker.elastic.group import waiting
from shoal_worker.elastic.session.worker_process import find_session
from torch import nn

COLLECTIVE = timedelta(seconds=1)
DISK_S = 1.3


def operation(body: Any) -> Any:
    """Runs an operation on a rank of a launch."""
    net = nn.Linear(1, 1)
    shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    session = find_session()
    assert session is not None
    return session.operation("a test", body)


def test_write_longer_than_the_timeout_of_a_collective_loses_no_rank() -> None:
    def rank() -> bool:
        writer = CheckpointWriter()
        if shoal.rank() == 1:
            writer.submit(
                lambda: threading.Event().wait(DISK_S), what="writing", timeout=COLLECTIVE
            )
        operation(lambda channel: in_company(channel, writer.done_within))
        return writer.busy

    assert shoal.launch(rank, world_size=2, timeout=COLLECTIVE) == [False, False]


def test_only_the_first_rank_gets_the_value_it_reads() -> None:
    assert shoal.launch(
        lambda: operation(lambda channel: on_first(channel, lambda: "read")), world_size=3
    ) == ["read", None, None]


def test_error_while_reading_is_raised_on_the_reading_rank() -> None:
    def read() -> None:
        raise CorruptDataError("damaged")

    with pytest.raises(CorruptDataError, match="damaged"):
        shoal.launch(lambda: operation(lambda channel: on_first(channel, read)), world_size=2)


def test_a_disk_that_never_answers_is_given_up() -> None:
    never = threading.Event()
    try:
        with pytest.raises(DeadlineError, match="is the disk or the object store"):
            shoal.launch(
                lambda: operation(
                    lambda channel: on_first(channel, never.wait, patience=timedelta(seconds=0.1))
                ),
                world_size=2,
            )
    finally:
        never.set()


def test_slow_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.5)

    def rank() -> None:
        writer = CheckpointWriter()
        if shoal.rank() == 1:
            writer.submit(
                lambda: threading.Event().wait(DISK_S), what="writing", timeout=COLLECTIVE
            )
        operation(lambda channel: in_company(channel, writer.done_within))

    shoal.launch(rank, world_size=2, timeout=COLLECTIVE)
    assert (
        "waiting for a checkpoint's files for 1 s: ranks [1] of 2 are still reading or writing them"
        in caplog.text
    )
