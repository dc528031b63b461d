"""The bytes in workers' pipes become lines with a rank prefix."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.launcher.workers.output import LineSplitter, OutputPump, Source, Stream, rank_prefix


def split(*pieces: bytes) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.flush()


def test_lines_are_complete_however_they_were_written() -> None:
    assert split(b"on", b"e\ntwo\nth", b"ree\n") == [b"one\n", b"two\n", b"three\n"]


def test_unfinished_last_line_is_terminated() -> None:
    assert split(b"one\nrest") == [b"one\n", b"rest\n"]


def test_split_windows_line_ending_is_one_line_ending() -> None:
    assert split(b"one\r", b"\ntwo\n") == [b"one\r\n", b"two\n"]


def test_a_progress_bar_shows_while_it_moves() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%") == []
    assert splitter.feed(b"\r 20%") == [b" 10%\r"]
    assert splitter.flush() == [b" 20%\n"]


def test_unterminated_line_is_shown_in_pieces() -> None:
    splitter = LineSplitter()
    pieces = [line for _ in range(40) for line in splitter.feed(b"x" * 65536)] + splitter.flush()
    assert len(pieces) == 3
    assert b"".join(piece[:-1] for piece in pieces) == b"x" * (40 * 65536)


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_only_lone_carriage_returns_are_dropped_however_the_bytes_are_split(
    pieces: list[bytes],
) -> None:
    data = b"".join(pieces)
    assert b"".join(split(*pieces)).replace(b"\r", b"").rstrip(b"\n") == data.replace(
        b"\r", b""
    ).rstrip(b"\n")


class Collector:
    """A writer that stores its lines and can be waited for."""

    def __init__(self) -> None:
        self.lines: dict[Stream, bytes] = {Stream.OUT: b"", Stream.ERR: b""}
        self._changed = threading.Condition()

    def __call__(self, stream: Stream, data: bytes) -> None:
        with self._changed:
            self.lines[stream] += data
            self._changed.notify_all()

    def wait_for(self, text: bytes) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.lines[Stream.OUT], timeout=60), (
                f"no {text!r} in {self.lines}"
            )


def source(
    prefix: bytes = b"", *, console: bool = True, file: Path | None = None
) -> tuple[Source, int]:
    reading, writing = os.pipe()
    return Source(
        pipe=os.fdopen(reading, "rb", buffering=0),
        stream=Stream.OUT,
        prefix=prefix,
        console=console,
        file=file,
    ), writing


def test_each_line_carries_its_rank_and_no_line_is_torn() -> None:
    seen = Collector()
    pump = OutputPump(seen)
    writers = []
    for rank in range(4):
        one, descriptor = source(rank_prefix(rank, colour=False))
        pump.attach(one)
        writers.append(threading.Thread(target=write_lines, args=(descriptor, rank)))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    pump.close(timedelta(seconds=60))
    lines = seen.lines[Stream.OUT].splitlines()
    assert sorted(lines) == sorted(
        b"[%d]: line %d of %d" % (rank, number, rank) for rank in range(4) for number in range(500)
    )


def write_lines(descriptor: int, rank: int) -> None:
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for number in range(500):
            file.write(b"line %d of " % number)
            file.write(b"%d\n" % rank)


def test_finish_reads_available_output_without_waiting_for_another_process_with_the_pipe() -> None:
    seen = Collector()
    pump = OutputPump(seen)
    one, descriptor = source()
    pump.attach(one)
    os.write(descriptor, b"last words")
    pump.finish(one)
    pump.say("after\n")
    pump.close(timedelta(seconds=60))
    os.close(descriptor)
    assert seen.lines == {Stream.OUT: b"last words\n", Stream.ERR: b"after\n"}


def test_output_appears_while_the_process_runs() -> None:
    seen = Collector()
    pump = OutputPump(seen)
    one, descriptor = source(b"[0]: ")
    pump.attach(one)
    os.write(descriptor, b"now\n")
    seen.wait_for(b"[0]: now\n")
    os.close(descriptor)
    pump.close(timedelta(seconds=60))


def test_file_receives_the_original_bytes_and_the_console_may_be_omitted(tmp_path: Path) -> None:
    seen = Collector()
    pump = OutputPump(seen)
    log = tmp_path / "attempt_0" / "1" / "stdout.log"
    one, descriptor = source(b"[1]: ", console=False, file=log)
    pump.attach(one)
    os.write(descriptor, b"\x00raw\r\nno end")
    os.close(descriptor)
    pump.close(timedelta(seconds=60))
    assert log.read_bytes() == b"\x00raw\r\nno end"
    assert seen.lines[Stream.OUT] == b""


@pytest.mark.parametrize("rank", [0, 1, 11, 12, 9999])
def test_prefixes_name_the_rank_with_and_without_colour(rank: int) -> None:
    assert rank_prefix(rank, colour=False) == b"[%d]: " % rank
    assert b"[%d]:" % rank in rank_prefix(rank, colour=True)
