"""Reading and restoring rows is retried after transient errors, and only after these."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from shoal_common.errors import CorruptDataError, InvalidRequestError, ShoalError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.server_waits import ServerWaits
from shoal_worker.sparse_tables.row_reader import RowReader


@pytest.fixture
def reader() -> Iterator[RowReader]:
    job = cast(Job, SimpleNamespace(leaving=False, shard_map=lambda: None, waits=ServerWaits()))
    reader = RowReader(job, pb.ShardMap(), patience=timedelta(minutes=10))
    yield reader
    reader.close()


@pytest.mark.parametrize(
    "error", [UnavailableError("away"), CorruptDataError("on the way", reason="CHECKSUM_MISMATCH")]
)
def test_transient_failures_are_retried(reader: RowReader, error: ShoalError) -> None:
    outcomes = [error, error, None]

    def attempt() -> str:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        return "done"

    assert reader.retry_until(attempt) == "done"


@pytest.mark.parametrize(
    "error",
    [
        CorruptDataError("a damaged file", reason="FILE_CORRUPT"),
        InvalidRequestError("rows", reason="ROWS_INVALID"),
    ],
)
def test_permanent_failures_are_raised_at_once(reader: RowReader, error: ShoalError) -> None:
    attempts: list[int] = []

    def attempt() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        reader.retry_until(attempt)
    assert len(attempts) == 1
