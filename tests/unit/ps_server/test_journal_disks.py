"""A full or failing disk under the journal: refused changes have no effect, not even after a kill,
and pushes continue once the disk has room."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from shoal_common.errors import UnavailableError
from shoal_ps_server.shard.optimizer import optimizer_settings
from shoal_ps_server.storage.segments import Segments

from tests.unit.ps_server.journaled import (
    begun,
    file,
    largest_file,
    opened,
    recovered,
    run,
    same,
    state_of,
)


def test_full_disk_refuses_pushes_without_a_change_until_there_is_room(make, tmp_path) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            await server.push(make.upload(torch.randn(6), make.spec(0)))
            before = state_of(server.shard)
            with largest_file(file(data).stat().st_size + 100):
                # There is room for only a part of the next record. The last upload repeats one that
                # is in progress, and is refused like it.
                uploads = [
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=2)
                    for step in (2, 3, 4, 3)
                ]
                errors = await asyncio.gather(*map(server.push, uploads), return_exceptions=True)
                for error in errors:
                    assert isinstance(error, UnavailableError)
                    assert "could not write the update to the journal" in str(error)
                    assert error.reason == "JOURNAL_FAILED"
                    assert error.retry_after == timedelta(seconds=2)
                assert same(state_of(server.shard), before)
                with server.shard.reading(0) as reading:  # values can still be read
                    assert reading.version == 2
            with largest_file(10):  # there is no room for a new file either
                with pytest.raises(UnavailableError):
                    await server.configure(
                        optimizer_settings(name="adamw", hyperparameters={"lr": 9.0})
                    )
                with pytest.raises(UnavailableError):
                    await server.snapshots.write()
                assert server.configuration is not None
                assert server.configuration.optimizer.hyperparameters["lr"] == 0.1
            assert not server.failures
            for step in (2, 3):
                outcome = await server.push(
                    make.upload(torch.randn(6), make.spec(0), sequence=step, base_version=2)
                )
                assert (outcome.version, outcome.duplicate) == (step + 1, False)
            before = state_of(server.shard)
        assert same(recovered(data), before)

    run(test())


def test_refusals_of_a_full_disk_are_logged_once_in_ten_seconds(make, tmp_path, caplog) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            with largest_file(10):
                for _ in range(50):
                    with pytest.raises(UnavailableError):
                        await server.push(make.upload(torch.randn(6), make.spec(0)))
            await server.push(make.upload(torch.randn(6), make.spec(0)))

    caplog.set_level("INFO")
    started = time.monotonic()
    run(test())
    lines = [
        record for record in caplog.records if "could not write the journal" in record.getMessage()
    ]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - started) / 10
    (recovered,) = [
        record for record in caplog.records if "resumed writing the journal" in record.getMessage()
    ]
    assert recovered.batches_refused == 50


def test_refused_change_is_not_recovered_although_the_disk_has_it(
    make, tmp_path, monkeypatch
) -> None:
    """A push whose sync failed is not restored, although the disk has it, and the process is killed
    before anything else is written."""
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            await server.push(make.upload(torch.randn(6), make.spec(0)))
            before = state_of(server.shard)
            real = os.fdatasync
            failures = iter([OSError(5, "Input/output error")])

            def failing(descriptor: int) -> None:
                if (error := next(failures, None)) is not None:
                    raise error
                real(descriptor)

            with monkeypatch.context() as broken:
                broken.setattr(os, "fdatasync", failing)
                with pytest.raises(UnavailableError):
                    await server.push(
                        make.upload(torch.randn(6), make.spec(0), sequence=2, base_version=2)
                    )
            assert same(recovered(data), before)

    run(test())


def test_disk_with_room_for_part_of_a_group_takes_none_of_it(make, tmp_path, monkeypatch) -> None:
    """A disk with room for only some of the changes that are written together refuses all of them,
    even after a kill and without room for a new file."""
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)
            await server.push(make.upload(torch.randn(6), make.spec(0)))
            uploads = [
                make.upload(torch.randn(6), make.spec(0), member=member, base_version=2)
                for member in "bc"
            ]
            uploads.append(make.upload(torch.randn(6), make.spec(0), sequence=3, base_version=2))
            syncing, synced = threading.Event(), threading.Event()
            real = os.fdatasync

            def delayed_sync(descriptor: int) -> None:
                syncing.set()
                synced.wait(10)
                real(descriptor)

            with monkeypatch.context() as patched:
                patched.setattr(os, "fdatasync", delayed_sync)
                first = asyncio.create_task(
                    server.push(
                        make.upload(torch.randn(6), make.spec(0), sequence=2, base_version=2)
                    )
                )
                await asyncio.to_thread(syncing.wait, 10)
                size = file(data).stat().st_size
                # they arrive while the first one is synced, so they are written together
                pushes = [asyncio.create_task(server.push(upload)) for upload in uploads]
                await asyncio.sleep(0.01)
                with largest_file(size + 450), monkeypatched_create():
                    synced.set()
                    errors = await asyncio.gather(*pushes, return_exceptions=True)
            assert (await first).version == 3
            assert all(isinstance(error, UnavailableError) for error in errors)
            assert file(data).stat().st_size > size
            assert same(recovered(data), state_of(server.shard))

    @contextmanager
    def monkeypatched_create() -> Iterator[None]:
        real = Segments.create

        def full(*_: object, **__: object) -> tuple[int, int]:
            raise OSError(28, "No space left on device")

        Segments.create = full
        try:
            yield
        finally:
            Segments.create = real

    run(test())


def test_applied_push_is_known_even_after_another_one_was_refused(make, tmp_path) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)
            await server.push(make.upload(torch.ones(6), make.spec(0)))
            with largest_file(10), pytest.raises(UnavailableError):
                await server.push(make.upload(torch.ones(6), make.spec(0), member="b"))
            assert (await server.push(make.upload(torch.ones(6), make.spec(0)))).duplicate

    run(test())


def test_error_in_the_writing_thread_refuses_and_the_next_push_is_written(
    make, tmp_path, monkeypatch
) -> None:
    async def test() -> None:
        async with opened(tmp_path / "data") as server:
            await begun(server, make)

            def no_memory(*_: object, **__: object) -> None:
                raise MemoryError

            with monkeypatch.context() as broken:
                broken.setattr("shoal_ps_server.storage.journal.write_all", no_memory)
                with pytest.raises(UnavailableError):
                    await server.push(make.upload(torch.ones(6), make.spec(0)))
            assert (await server.push(make.upload(torch.ones(6), make.spec(0)))).version == 2
            before = state_of(server.shard)
        assert same(recovered(tmp_path / "data"), before)

    run(test())


def test_written_change_that_cannot_be_applied_ends_the_server_before_later_ones(
    make, tmp_path, monkeypatch
) -> None:
    data = tmp_path / "data"

    async def test() -> None:
        async with opened(data) as server:
            await begun(server, make)

            def out_of_memory(*_: object) -> None:
                raise RuntimeError("can't allocate memory")

            with monkeypatch.context() as broken:
                broken.setattr("shoal_ps_server.shard.partition.Partition.apply", out_of_memory)
                with pytest.raises(
                    UnavailableError, match="this server is exiting and will recover"
                ):
                    await server.push(make.upload(torch.randn(6), make.spec(0)))
            assert [str(each) for each in server.failures] == ["can't allocate memory"]
            for change in (
                server.push(
                    make.upload(
                        torch.randn(4), make.spec(3, length=4, dtype="bfloat16", tensor="bias")
                    )
                ),
                server.snapshots.write(),
            ):
                with pytest.raises(UnavailableError):
                    await change
        found = recovered(data)
        assert (found[0].version, found[3].version) == (2, 1)

    run(test())
