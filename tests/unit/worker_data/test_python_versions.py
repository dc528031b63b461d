"""Differences between versions of Python. From 3.14 on, data workers are started by "forkserver",
which pickles what they need and imports the script again. Also tests the bytecode by which `break`
is recognized."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from shoal_common.errors import ConfigurationError
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.iteration import _left_by_for
from shoal_worker.data.streaming.sources import Sources
from shoal_worker.elastic.session.worker_process import open_session


@pytest.fixture
def spawning() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning")
@pytest.mark.filterwarnings("ignore:Got pickle error")  # raised by torch before the error
def test_a_collate_function_that_cannot_be_pickled_is_one_clear_error() -> None:
    fetcher = Fetcher([1, 2], collate_fn=lambda rows: rows, num_workers=1, pin_memory=False)
    request = Request(epoch=0, indices=(0,), key=(0,))
    with pytest.raises(
        ConfigurationError, match=r"started with method 'spawn'.*set_start_method\('fork'\)"
    ):
        fetcher.fetch(request, lambda: iter([request]))
    fetcher.close()


@pytest.mark.usefixtures("spawning")
def test_a_stream_that_cannot_be_pickled_is_one_clear_error() -> None:
    sources = Sources([lambda: iter([1])], num_workers=1, ahead=1)
    with pytest.raises(
        ConfigurationError, match=r"started with method 'spawn'.*set_start_method\('fork'\)"
    ):
        sources.open(0, key=(0,), name="the stream")
    sources.close()


def test_a_script_without_a_main_guard_is_refused_in_its_data_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match="each data worker imports the script"):
        open_session()


def test_break_is_distinguished_from_a_later_dropped_iterator() -> None:
    left: list[bool] = []

    def rows() -> Iterator[int]:
        try:
            yield from range(3)
        except GeneratorExit:
            left.append(_left_by_for())
            raise

    def batches() -> Iterator[int]:
        yield from rows()

    for row in batches():
        if row == 1:
            break
    assert left == [True]

    def returning() -> int | None:
        for row in batches():
            return row
        return None

    returning()
    assert left == [True, True]
    dropped = batches()
    next(dropped)
    del dropped
    assert left == [True, True, False]
