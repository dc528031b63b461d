"""The chunks of a pull fill the caller's buffers or raise one clear error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.clients.pull import PullReceiver
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_common.formats import wire
from shoal_protos.v1 import parameter_server_pb2 as pb


def header(partition_id: int, payload: bytes) -> pb.PullHeader:
    return pb.PullHeader(
        partition_id=partition_id,
        version=1,
        payload_bytes=len(payload),
        checksum=wire.checksum(payload),
    )


def receive_all(receiver: PullReceiver, chunks) -> None:
    for opened, payload in chunks:
        receiver.receive(opened, memoryview(payload))
    receiver.finish()


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 60))
def test_partitions_arrive_intact_for_any_chunking(payloads, size):
    buffers = {number: bytearray(len(payload)) for number, payload in enumerate(payloads)}
    receiver = PullReceiver(lambda opened: memoryview(buffers[opened.partition_id]))
    for number, payload in enumerate(payloads):
        for chunk in wire.framed(header(number, payload), memoryview(payload), size):
            receiver.receive(*chunk)
    assert [opened.partition_id for opened in receiver.finish()] == list(range(len(payloads)))
    assert [bytes(buffer) for buffer in buffers.values()] == payloads


def test_payloads_are_received_into_arrays_of_any_shape():
    target = np.zeros((2, 3), "<f4")
    payload = np.arange(6, dtype="<f4").tobytes()
    receiver = PullReceiver(lambda _: memoryview(target))
    receiver.receive(header(0, payload), memoryview(payload))
    receiver.finish()
    assert np.array_equal(target, np.arange(6, dtype="<f4").reshape(2, 3))


def test_unwanted_partition_is_dropped_but_still_checked_for_length():
    receiver = PullReceiver(lambda _: None)
    receiver.receive(header(0, b"abcd"), memoryview(b"ab"))
    with pytest.raises(CorruptDataError, match="2 of 4 bytes"):
        receiver.finish()


def test_unchanged_partitions_request_no_buffer():
    receiver = PullReceiver(lambda _: pytest.fail("no buffer may be requested"))
    receiver.receive(pb.PullHeader(partition_id=3, unchanged=True), memoryview(b""))
    assert receiver.finish()[0].partition_id == 3


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(None, b"abcd")], "STREAM_MALFORMED"),
        ([(header(0, b"abcd"), b"abc")], "PAYLOAD_TRUNCATED"),
        ([(header(0, b"abcd"), b"abc"), (header(1, b""), b"")], "PAYLOAD_TRUNCATED"),
        ([(header(0, b"abcd"), b"abc"), (None, b"de")], "STREAM_MALFORMED"),
        ([(header(0, b"abcd"), b"abcx")], "CHECKSUM_MISMATCH"),
        ([(pb.PullHeader(unchanged=True), b"a")], "STREAM_MALFORMED"),
        ([(pb.PullHeader(unchanged=True, payload_bytes=1), b"a")], "STREAM_MALFORMED"),
        ([(pb.PullHeader(payload_bytes=-1), b"")], "STREAM_MALFORMED"),
    ],
)
def test_inconsistent_streams_are_corrupt(chunks, reason):
    receiver = PullReceiver(lambda opened: memoryview(bytearray(max(0, opened.payload_bytes))))
    with pytest.raises(CorruptDataError) as refused:
        receive_all(receiver, chunks)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "buffer", [memoryview(bytearray(3)), memoryview(b"abcd")], ids=["short", "read-only"]
)
def test_unsuitable_buffer_is_refused(buffer):
    with pytest.raises(ConfigurationError, match="writable buffer of 4"):
        PullReceiver(lambda _: buffer).receive(header(0, b"abcd"), memoryview(b"abcd"))
