"""The tensor codec agrees with the generated protobuf classes in both directions, also on
garbage."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import CorruptDataError, InvalidRequestError
from shoal_common.formats import wire
from shoal_protos.v1 import parameter_server_pb2 as pb

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
PAYLOADS = st.one_of(
    st.binary(max_size=300),
    st.integers(0, 40_000).map(lambda size: bytes(size % 251 for _ in range(size))),
)

PUSH_HEADERS = st.builds(
    pb.PushHeader,
    job_id=st.text(max_size=70),
    member_id=st.text(max_size=200),
    generation=INT64,
    partition_id=INT32,
    sequence=INT64,
    dtype=st.sampled_from(pb.Dtype.values()),
    codec=st.sampled_from(pb.Codec.values()),
    payload_bytes=INT64,
    checksum=UINT64,
)
PULL_HEADERS = st.builds(
    pb.PullHeader,
    partition_id=INT32,
    version=INT64,
    dtype=st.sampled_from(pb.Dtype.values()),
    unchanged=st.booleans(),
    checksum=UINT64,
)

# (message, encode, decode, headers, error for malformed chunks)
PUSH = (pb.PushChunk, wire.encode_push_chunk, wire.decode_push_chunk, InvalidRequestError)
PULL = (pb.PullChunk, wire.encode_pull_chunk, wire.decode_pull_chunk, CorruptDataError)
CHUNKS = st.one_of(
    st.tuples(st.just(PUSH), st.none() | PUSH_HEADERS, PAYLOADS),
    st.tuples(st.just(PULL), st.none() | PULL_HEADERS, PAYLOADS),
)


def generated(message, header, payload: bytes):
    return message(payload=payload) if header is None else message(header=header, payload=payload)


@given(CHUNKS)
def test_encoding_is_byte_for_byte_that_of_protobuf(chunk):
    (message, encode, _, _), header, payload = chunk
    assert (
        encode((header, memoryview(payload)))
        == generated(message, header, payload).SerializeToString()
    )


@given(CHUNKS)
def test_protobuf_encoding_is_decoded_without_copying_the_payload(chunk):
    (message, _, decode, _), header, payload = chunk
    data = generated(message, header, payload).SerializeToString()
    got_header, got_payload = decode(data)
    assert (got_header is None) == (header is None)
    assert header is None or got_header == header
    assert got_payload == payload
    assert got_payload.obj is data
    assert got_payload.readonly


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


UNKNOWN_FIELDS = st.one_of(
    st.builds(field, st.integers(3, 2**29 - 1), st.binary(max_size=20)),
    st.builds(
        lambda number, value: varint(number << 3) + varint(value), st.integers(3, 1000), UINT64
    ),
    st.builds(
        lambda number, data: varint(number << 3 | 1) + data,
        st.integers(3, 1000),
        st.binary(min_size=8, max_size=8),
    ),
    st.builds(
        lambda number, data: varint(number << 3 | 5) + data,
        st.integers(3, 1000),
        st.binary(min_size=4, max_size=4),
    ),
    st.just(varint(9 << 3 | 3) + field(1, b"in a group") + varint(9 << 3 | 4)),
)
FIELDS = st.one_of(
    PUSH_HEADERS.map(lambda header: field(1, header.SerializeToString())),
    st.binary(max_size=200).map(lambda payload: field(2, payload)),
    # Varints of lengths and tags that are longer than needed are valid too.
    st.binary(max_size=100).map(
        lambda payload: b"\x12" + bytes([len(payload) | 0x80, 0x80, 0x00]) + payload
    ),
    st.binary(max_size=100).map(lambda payload: b"\x92\x00" + varint(len(payload)) + payload),
    UNKNOWN_FIELDS,
)


@given(st.lists(FIELDS, max_size=6))
def test_reordered_repeated_and_unknown_fields_are_decoded_like_protobuf(fields):
    data = b"".join(fields)
    expected = pb.PushChunk.FromString(data)
    header, payload = wire.decode_push_chunk(data)
    assert (header is not None) == expected.HasField("header")
    assert header is None or header.SerializeToString() == expected.header.SerializeToString()
    assert payload == expected.payload


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=80),
        # Garbage after a valid beginning.
        st.builds(
            lambda fields, tail: b"".join(fields) + tail,
            st.lists(FIELDS, max_size=3),
            st.binary(max_size=30),
        ),
        st.builds(
            lambda fields, cut: b"".join(fields)[: -cut or None],
            st.lists(FIELDS, max_size=3),
            st.integers(0, 50),
        ),
    )
)
def test_garbage_is_refused_exactly_when_protobuf_refuses_it(data):
    for message, _, decode, malformed in (PUSH, PULL):
        try:
            expected = message.FromString(data)
        except DecodeError:
            with pytest.raises(malformed) as refused:
                decode(data)
            assert refused.value.reason == "MESSAGE_MALFORMED"
        else:
            assert decode(data)[1] == expected.payload


@given(PUSH_HEADERS, st.binary(min_size=1, max_size=300), st.data())
def test_a_truncated_chunk_is_refused(header, payload, data):
    encoded = wire.encode_push_chunk((header, memoryview(payload)))
    header_end = len(wire.encode_push_chunk((header, memoryview(b""))))
    cut = data.draw(st.integers(0, len(encoded) - 1).filter(lambda cut: cut not in (0, header_end)))
    with pytest.raises(InvalidRequestError, match="PushChunk"):
        wire.decode_push_chunk(encoded[:cut])


def test_field_numbers_match_those_of_the_codec():
    for message in (pb.PushChunk, pb.PullChunk, pb.FollowChunk, pb.RowsChunk):
        numbers = {f.name: (f.number, f.type) for f in message.DESCRIPTOR.fields}
        assert numbers == {"header": (1, 11), "payload": (2, 12)}  # 11: message, 12: bytes


@given(st.binary(max_size=5000), st.integers(1, 6000))
def test_chunks_cover_the_buffer_in_order_and_none_is_too_large(data, size):
    pieces = list(wire.chunks(memoryview(data), size))
    assert b"".join(pieces) == data
    assert len(pieces) == max(1, -(-len(data) // size))
    assert all(piece.nbytes <= size for piece in pieces)


def test_only_the_first_chunk_of_a_partition_has_the_header():
    header = pb.PushHeader(partition_id=7)
    framed = list(wire.framed(header, memoryview(bytes(2500)), size=1000))
    assert [(first, piece.nbytes) for first, piece in framed] == [
        (header, 1000),
        (None, 1000),
        (None, 500),
    ]
    assert [(first, piece.nbytes) for first, piece in wire.framed(header, memoryview(b""))] == [
        (header, 0)
    ]


@pytest.mark.parametrize("info", wire.DTYPES.values(), ids=lambda info: info.name)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 5)])
def test_arrays_of_every_dtype_and_shape_survive_a_round_trip(info, shape):
    array = (np.arange(np.prod(shape, dtype=int)) + 1).astype(info.numpy).reshape(shape)
    _, payload = wire.decode_push_chunk(wire.encode_push_chunk((None, memoryview(array))))
    assert np.array_equal(np.frombuffer(payload, info.numpy).reshape(shape), array)


def test_every_dtype_of_the_contract_is_known_by_number_and_by_name():
    assert set(wire.DTYPES) == set(pb.Dtype.values()) - {pb.DTYPE_UNSPECIFIED}
    for name, value in pb.Dtype.items():
        if value != pb.DTYPE_UNSPECIFIED:
            short = name.removeprefix("DTYPE_").lower()
            assert wire.dtype_info(short) is wire.dtype_info(value)
            assert (
                wire.dtype_info(value).item_bytes == int("".join(filter(str.isdigit, short))) // 8
            )


@pytest.mark.parametrize("dtype", [0, 99, "int8", "FLOAT32", ""])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidRequestError, match="float32, float64, float16, bfloat16") as refused:
        wire.dtype_info(dtype)
    assert refused.value.reason == "DTYPE_UNSUPPORTED"


def test_buffers_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="C-contiguous"):
        wire.as_bytes(memoryview(np.zeros((4, 4))[:, ::2]))


def test_checksum_is_xxh3_64_of_the_bytes_for_any_shape():
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    assert wire.checksum(memoryview(array)) == wire.checksum(array.tobytes())
    # xxHash's published test vector for an empty input
    assert wire.checksum(b"") == 0x2D06800538D394C2
