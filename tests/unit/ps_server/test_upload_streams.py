"""Upload streams are split into complete partitions or refused with a reason, regardless of their
content and of how it is chunked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import CorruptDataError, InvalidRequestError, LimitError, ShoalError
from shoal_common.formats import codecs
from shoal_common.formats.wire import checksum, encode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.service.requests import UploadKind, parse_upload_header
from shoal_ps_server.service.streams import parts_of, received_partitions
from shoal_ps_server.shard.payload import Upload, bytes_of

LENGTHS = {0: 6, 1: 40, 2: 0, 3: 5000}


@pytest.fixture(scope="module")
def layout(make):
    return make.layout(*(make.spec(number, length=length) for number, length in LENGTHS.items()))


def header(partition_id: int, **changes: int | str) -> pb.PushHeader:
    length = LENGTHS.get(partition_id, 1)
    made = pb.PushHeader(
        job_id="job",
        member_id="member",
        generation=1,
        partition_id=partition_id,
        shard_map_epoch=1,
        sequence=1,
        base_version=1,
        clock=1,
        dtype=pb.DTYPE_FLOAT32,
        codec=pb.CODEC_RAW,
        length=length,
        payload_bytes=4 * length,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def chunk(opening: pb.PushHeader | None, payload: bytes = b"") -> bytes:
    return encode_push_chunk((opening, memoryview(payload)))


def receive(
    layout, messages: Sequence[bytes], kind: UploadKind = UploadKind.PUSH
) -> tuple[list[Upload], ShoalError | None]:
    """Returns the partitions that arrived completely and the error that refused the stream, if
    any."""
    uploads: list[Upload] = []

    async def scenario() -> None:
        async def stream() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        async def open_upload(opening: pb.PushHeader) -> Upload:
            return Upload(parse_upload_header(opening, layout, kind))

        async for upload in received_partitions(parts_of(stream()), open_upload):
            uploads.append(upload)

    try:
        asyncio.run(scenario())
    except ShoalError as error:
        return uploads, error
    return uploads, None


def refusal(layout, *messages: bytes) -> ShoalError:
    _, error = receive(layout, messages)
    assert error is not None
    return error


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_partitions_are_reassembled_for_any_chunking(layout, data) -> None:
    wanted = data.draw(st.lists(st.sampled_from([0, 1, 2]), max_size=4))
    messages, payloads = [], []
    for partition_id in wanted:
        payload = (
            np.random.default_rng(partition_id)
            .standard_normal(LENGTHS[partition_id], np.float32)
            .tobytes()
        )
        cuts = (
            sorted(data.draw(st.sets(st.integers(1, len(payload) - 1), max_size=5)))
            if payload
            else []
        )
        pieces = [
            payload[start:end] for start, end in zip([0, *cuts], [*cuts, len(payload)], strict=True)
        ]
        messages += [
            chunk(header(partition_id) if index == 0 else None, piece)
            for index, piece in enumerate(pieces)
        ]
        payloads.append(payload)
    uploads, error = receive(layout, messages)
    assert error is None
    assert [upload.header.spec.partition_id for upload in uploads] == wanted
    assert [bytes(bytes_of(upload.values())) for upload in uploads] == payloads


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"partition_id": 9}, "PARTITION_UNKNOWN"),
        ({"dtype": pb.DTYPE_FLOAT64}, "DTYPE_MISMATCH"),
        ({"dtype": pb.DTYPE_UNSPECIFIED}, "DTYPE_MISMATCH"),
        ({"codec": pb.CODEC_UNSPECIFIED}, "CODEC_UNSUPPORTED"),
        ({"length": 7}, "LENGTH_MISMATCH"),
        ({"length": -6}, "LENGTH_MISMATCH"),
        ({"payload_bytes": 20}, "PAYLOAD_SIZE_MISMATCH"),
        ({"payload_bytes": -1}, "PAYLOAD_SIZE_MISMATCH"),
        ({"payload_bytes": (16 << 20) + 1}, "PAYLOAD_TOO_LARGE"),
        ({"sequence": 0}, "SEQUENCE_INVALID"),
        ({"sequence": -4}, "SEQUENCE_INVALID"),
        ({"base_version": 0}, "REQUEST_INVALID"),
        ({"clock": -1}, "REQUEST_INVALID"),
        ({"generation": -1}, "REQUEST_INVALID"),
        ({"member_id": ""}, "REQUEST_INVALID"),
        ({"member_id": "m" * 129}, "REQUEST_INVALID"),
    ],
)
def test_a_wrong_header_is_refused_before_its_payload(layout, changes, reason) -> None:
    partition = header(0)
    for name, value in changes.items():
        setattr(partition, name, value)
    error = refusal(layout, chunk(partition))
    assert error.reason == reason
    assert str(next(iter(changes.values())))[:20] in str(error) or reason in (
        "DTYPE_MISMATCH",
        "CODEC_UNSUPPORTED",
    )


@pytest.mark.parametrize(
    "codec",
    [
        pb.CODEC_FLOAT16,
        pb.CODEC_BFLOAT16,
        pb.CODEC_INT8,
        pb.CODEC_SIGN,
        pb.CODEC_TOPK,
        pb.CODEC_RANDOMK,
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_compressed_partition_is_decoded_by_its_codec(make, codec, dtype) -> None:
    values = np.random.default_rng(codec).standard_normal(LENGTHS[3]).astype(np.float32)
    payload = bytes(
        codecs.encode(codec, values, kept=50 if codec in (pb.CODEC_TOPK, pb.CODEC_RANDOMK) else 0)
    )
    spec = make.spec(3, length=LENGTHS[3], dtype=dtype)
    about = header(
        3,
        codec=codec,
        payload_bytes=len(payload),
        checksum=checksum(payload),
        dtype=spec.element.wire,
    )
    (upload,), error = receive(
        make.layout(spec), [chunk(about, payload[:70]), chunk(None, payload[70:])]
    )
    assert error is None
    expected = np.empty(LENGTHS[3], np.float32)
    codecs.decode(codec, payload, expected)
    assert torch.equal(upload.values(), torch.from_numpy(expected).to(spec.element.torch))


def compressed(
    codec: pb.Codec, values: np.ndarray, damage: Callable[[bytes], bytes] = bytes, **changes: int
) -> bytes:
    payload = damage(bytes(codecs.encode(codec, values.astype(np.float32), kept=3)))
    return chunk(header(1, codec=codec, **({"payload_bytes": len(payload)} | changes)), payload)


ONES, NAN = np.ones(40), np.where(np.arange(40) == 7, np.nan, 1.0)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (compressed(pb.CODEC_INT8, ONES, lambda p: p[:-4]), "PAYLOAD_SIZE_MISMATCH"),
        (compressed(pb.CODEC_TOPK, ONES, payload_bytes=8 + 6 * 41), "PAYLOAD_SIZE_MISMATCH"),
        (compressed(pb.CODEC_SIGN, ONES, lambda p: p + bytes(4)), "PAYLOAD_SIZE_MISMATCH"),
        (compressed(pb.CODEC_TOPK, ONES, lambda p: bytes(4) + p[4:]), "PAYLOAD_INVALID"),
        (
            compressed(pb.CODEC_RANDOMK, ONES, lambda p: (40).to_bytes(8, "little") + p[8:]),
            "PAYLOAD_INVALID",
        ),
        (compressed(pb.CODEC_FLOAT16, NAN), "GRADIENT_NOT_FINITE"),
        (compressed(pb.CODEC_SIGN, NAN), "GRADIENT_NOT_FINITE"),
        (compressed(pb.CODEC_BFLOAT16, ONES, checksum=1), "CHECKSUM_MISMATCH"),
    ],
)
def test_invalid_compressed_partition_is_refused(layout, message, reason) -> None:
    uploads, error = receive(layout, [message])
    if error is None:
        with pytest.raises(ShoalError) as refused:
            uploads[0].values()
        error = refused.value
    assert error.reason == reason
    assert isinstance(
        error, CorruptDataError if reason == "CHECKSUM_MISMATCH" else InvalidRequestError
    )


def test_first_values_are_not_compressed(layout) -> None:
    message = chunk(
        header(0, codec=pb.CODEC_FLOAT16, payload_bytes=12, sequence=0, base_version=0), bytes(12)
    )
    _, error = receive(layout, [message], UploadKind.INITIALIZE)
    assert error is not None
    assert error.reason == "CODEC_UNSUPPORTED"


def test_first_values_need_neither_sequence_nor_version(layout) -> None:
    message = chunk(header(0, sequence=0, base_version=0), bytes(24))
    uploads, error = receive(layout, [message], UploadKind.INITIALIZE)
    assert (len(uploads), error) == (1, None)
    assert refusal(layout, message).reason == "SEQUENCE_INVALID"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([chunk(None, b"1234")], "STREAM_MALFORMED"),
        ([chunk(header(0), bytes(23))], "PAYLOAD_TRUNCATED"),
        ([chunk(header(0))], "PAYLOAD_TRUNCATED"),
        ([chunk(header(0), bytes(20)), chunk(header(1), bytes(160))], "PAYLOAD_TRUNCATED"),
        ([chunk(header(0), bytes(25))], "PAYLOAD_SIZE_MISMATCH"),
        ([chunk(header(0), bytes(20)), chunk(None, bytes(5))], "PAYLOAD_SIZE_MISMATCH"),
        ([chunk(header(0), bytes(24)), chunk(None, b"more")], "STREAM_MALFORMED"),
        ([chunk(header(0), bytes((4 << 20) + 1))], "PAYLOAD_TOO_LARGE"),
        ([chunk(header(3), b"1234"), chunk(None)], "STREAM_MALFORMED"),
        ([b"\xff\xff\xff"], "MESSAGE_MALFORMED"),
    ],
)
def test_incorrectly_chunked_stream_is_refused(layout, messages, reason) -> None:
    uploads, error = receive(layout, messages)
    assert error is not None
    assert error.reason == reason
    assert isinstance(error, InvalidRequestError | LimitError)
    assert len(uploads) == (1 if messages[0] == chunk(header(0), bytes(24)) else 0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                lambda partition_id, changes, payload: chunk(
                    header(partition_id, **changes), payload
                ),
                st.sampled_from([0, 1, 2, 3, 99, -1]),
                st.dictionaries(
                    st.sampled_from(
                        [
                            "length",
                            "payload_bytes",
                            "sequence",
                            "base_version",
                            "clock",
                            "generation",
                        ]
                    ),
                    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-1, 200)),
                    max_size=2,
                ),
                st.binary(max_size=200),
            ),
            st.binary(max_size=200).map(lambda payload: chunk(None, payload)),
        ),
        max_size=6,
    )
)
def test_arbitrary_input_gives_complete_partitions_or_a_refusal(layout, messages) -> None:
    uploads, error = receive(layout, messages)
    for upload in uploads:
        assert (upload.received, upload.missing) == (upload.header.spec.nbytes, 0)
    assert error is None or error.reason in {
        "MESSAGE_MALFORMED",
        "STREAM_MALFORMED",
        "PARTITION_UNKNOWN",
        "LENGTH_MISMATCH",
        "PAYLOAD_SIZE_MISMATCH",
        "PAYLOAD_TOO_LARGE",
        "PAYLOAD_TRUNCATED",
        "SEQUENCE_INVALID",
        "REQUEST_INVALID",
        "DTYPE_MISMATCH",
        "CODEC_UNSUPPORTED",
    }
