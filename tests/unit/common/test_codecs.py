"""The layouts of compressed payloads: the error of each codec, and decoders that fail cleanly on
arbitrary bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from shoal_common.errors import ConfigurationError, InvalidRequestError
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb

ALL = [
    codec for codec in pb.Codec.values() if codec not in (pb.CODEC_UNSPECIFIED, pb.CODEC_POWERSGD)
]
"""Codecs whose payload sizes follow from the length alone."""
SPARSE = (pb.CODEC_TOPK, pb.CODEC_RANDOMK)
LENGTHS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([255, 256, 257, 1023, 1024, 1025, 65_535, 65_536, 65_537, 140_000]),
)
FLOATS = hnp.arrays(np.float32, st.integers(0, 700), elements=st.floats(-1e4, 1e4, width=32))


def drawn(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(length, np.float32)


def kept_of(codec: int, length: int) -> int:
    return -(-length // 10) if codec in SPARSE else 0


def decoded(codec: int, payload: memoryview | bytes, length: int) -> np.ndarray:
    out = np.full(length, 7, np.float32)
    codecs.decode(codec, payload, out)
    return out


def test_every_codec_of_the_protocol_has_a_layout():
    assert all(codecs.payload_bytes(codec, 1000, 10) > 0 for codec in ALL)


@given(st.sampled_from(ALL), LENGTHS)
def test_payload_has_the_stated_length_and_a_multiple_of_4(codec, length):
    kept = kept_of(codec, length)
    payload = codecs.encode(codec, drawn(length), kept=kept)
    assert payload.nbytes == codecs.payload_bytes(codec, length, kept)
    assert payload.nbytes % 4 == 0
    assert decoded(codec, payload, length).shape == (length,)


def test_sizes_match_the_layouts():
    n = 1 << 20
    sizes = {codec: codecs.payload_bytes(codec, n, n // 100) for codec in ALL}
    assert sizes == {
        pb.CODEC_RAW: 4 * n,
        pb.CODEC_FLOAT16: 2 * n,
        pb.CODEC_BFLOAT16: 2 * n,
        pb.CODEC_INT8: n + n // 64,
        pb.CODEC_SIGN: n // 8 + n // 256,
        pb.CODEC_TOPK: 4 * 16 + 6 * (n // 100) + 2,
        pb.CODEC_RANDOMK: 16 + 4 * (n // 100),
    }


@given(FLOATS)
def test_half_precision_loses_no_more_than_its_rounding(values):
    half = decoded(pb.CODEC_FLOAT16, codecs.encode(pb.CODEC_FLOAT16, values), values.size)
    assert np.all(np.abs(half - values) <= np.maximum(np.abs(values) * 2**-11, 2**-25))
    bfloat = decoded(pb.CODEC_BFLOAT16, codecs.encode(pb.CODEC_BFLOAT16, values), values.size)
    assert np.all(np.abs(bfloat - values) <= np.maximum(np.abs(values) * 2**-8, 1e-38))


@given(FLOATS, st.integers(0, 5))
def test_int8_is_off_by_less_than_one_level_of_its_block(values, seed):
    out = decoded(pb.CODEC_INT8, codecs.encode(pb.CODEC_INT8, values, seed=seed), values.size)
    for start in range(0, values.size, codecs.INT8_BLOCK):
        block = slice(start, start + codecs.INT8_BLOCK)
        level = np.abs(values[block]).max() / 127
        assert np.all(np.abs(out[block] - values[block]) <= level * 1.0001 + 3e-36)


@given(FLOATS)
def test_sign_keeps_signs_and_the_mean_magnitude_of_a_block(values):
    out = decoded(pb.CODEC_SIGN, codecs.encode(pb.CODEC_SIGN, values), values.size)
    for start in range(0, values.size, codecs.SIGN_BLOCK):
        block = slice(start, start + codecs.SIGN_BLOCK)
        np.testing.assert_allclose(
            np.abs(out[block]), np.abs(values[block]).mean(), rtol=1e-5, atol=1e-37
        )
        assert np.all((out[block] < 0) == ((values[block] < 0) & (out[block] != 0)))


@given(st.integers(1, 300), st.floats(0.001, 1), st.integers(0, 1000))
def test_topk_keeps_the_largest_exactly_and_nothing_else(length, share, seed):
    values, kept = drawn(length, seed), max(1, int(share * length))
    out = decoded(pb.CODEC_TOPK, codecs.encode(pb.CODEC_TOPK, values, kept=kept), values.size)
    largest = np.argsort(-np.abs(values))[:kept]
    expected = np.zeros_like(values)
    expected[largest] = values[largest]
    np.testing.assert_array_equal(out, expected)


def test_topk_finds_elements_beyond_one_block():
    values = np.zeros(200_001, np.float32)
    places = [0, 65_535, 65_536, 131_072, 200_000]
    values[places] = [5, -4, 3, -2, 1]
    np.testing.assert_array_equal(
        decoded(pb.CODEC_TOPK, codecs.encode(pb.CODEC_TOPK, values, kept=5), values.size), values
    )


@given(st.integers(1, 500), st.integers(0, 20))
def test_randomk_sends_k_distinct_elements_unchanged(length, seed):
    values = np.arange(1, length + 1, dtype=np.float32)
    kept = -(-length // 3)
    out = decoded(
        pb.CODEC_RANDOMK, codecs.encode(pb.CODEC_RANDOMK, values, kept=kept, seed=seed), length
    )
    assert np.count_nonzero(out) == kept
    assert np.all((out == values) | (out == 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ALL)
def test_non_finite_values_stay_non_finite(codec, bad):
    values = drawn(3000)
    values[1234] = bad
    assert not np.isfinite(
        decoded(codec, codecs.encode(codec, values, kept=kept_of(codec, 3000)), 3000)
    ).all()


def test_values_too_large_for_float16_become_infinite():
    out = decoded(
        pb.CODEC_FLOAT16, codecs.encode(pb.CODEC_FLOAT16, np.array([1e6, -1e6], np.float32)), 2
    )
    np.testing.assert_array_equal(out, [np.inf, -np.inf])


# --- arbitrary bytes


@given(
    st.sampled_from([*ALL, pb.CODEC_POWERSGD, 0, 99, -1]),
    st.binary(max_size=600),
    st.integers(0, 300),
)
def test_any_bytes_are_decoded_or_refused(codec, payload, length):
    out = np.zeros(length, np.float32)
    with np.errstate(all="ignore"):
        try:
            codecs.decode(codec, payload, out)
        except InvalidRequestError:
            pass


@given(st.sampled_from(ALL), st.integers(0, 300), st.data())
def test_a_payload_with_bytes_changed_is_decoded_or_refused(codec, length, data):
    payload = bytearray(codecs.encode(codec, drawn(length), kept=kept_of(codec, length)))
    for _ in range(data.draw(st.integers(1, 4)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded(codec, bytes(payload), length)
    except InvalidRequestError:
        pass


@given(st.sampled_from(ALL), st.integers(1, 300), st.sampled_from([-8, -4, -1, 1, 4]))
def test_a_truncated_or_extended_payload_is_refused_or_is_another_valid_one(codec, length, change):
    payload = bytes(codecs.encode(codec, drawn(length), kept=kept_of(codec, length)))
    changed = payload[:change] if change < 0 else payload + bytes(change)
    if codec not in SPARSE:
        with pytest.raises(InvalidRequestError, match="bytes; expected"):
            decoded(codec, changed, length)
        return
    try:
        decoded(codec, changed, length)
    except InvalidRequestError:
        pass


@pytest.mark.parametrize(
    "damage",
    [
        # swapped values, which are still valid and must be decoded
        lambda p: p[:4] + p[8:12] + p[4:8] + p[12:],
        lambda p: (5).to_bytes(4, "little") + p[4:],  # the count exceeds the content
        lambda p: (2**32 - 1).to_bytes(4, "little") + p[4:],
        lambda p: p[:20] + p[20:22] * 4,  # one position four times
        lambda p: p[:26] + (400).to_bytes(2, "little"),  # a position outside the tensor
    ],
)
def test_contradictory_topk_indices_are_refused(damage):
    payload = bytes(codecs.encode(pb.CODEC_TOPK, drawn(300), kept=4))
    damaged = damage(payload)
    if damaged[20:] == payload[20:] and damaged[:4] == payload[:4]:
        decoded(pb.CODEC_TOPK, damaged, 300)
        return
    with pytest.raises(InvalidRequestError, match="TOPK") as refusal:
        decoded(pb.CODEC_TOPK, damaged, 300)
    assert refusal.value.reason == "PAYLOAD_INVALID"


@pytest.mark.parametrize("kept", [0, 10])
@pytest.mark.parametrize(
    ("start", "stride"), [(300, 7), (0, 300), (0, 0), (1, 6), (2**63, 1), (0, 2**64 - 1)]
)
def test_repeated_or_out_of_range_randomk_indices_are_refused(start, stride, kept):
    payload = start.to_bytes(8, "little") + stride.to_bytes(8, "little") + bytes(4 * kept)
    with pytest.raises(InvalidRequestError, match="RANDOMK"):
        decoded(pb.CODEC_RANDOMK, payload, 300)


@pytest.mark.parametrize(("start", "stride"), [(1, 1), (0, 2), (2**63, 1)])
def test_randomk_of_no_values_has_no_indices(start, stride):
    with pytest.raises(InvalidRequestError, match="RANDOMK"):
        decoded(pb.CODEC_RANDOMK, start.to_bytes(8, "little") + stride.to_bytes(8, "little"), 0)


def test_refused_payload_allocates_almost_nothing():
    payload = bytearray(codecs.encode(pb.CODEC_TOPK, drawn(300), kept=4))
    payload[:4] = (2**32 - 1).to_bytes(4, "little")
    out = np.zeros(300, np.float32)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            codecs.decode(pb.CODEC_TOPK, bytes(payload), out)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="contiguous one-dimensional float32"):
        codecs.decode(pb.CODEC_RAW, b"", np.zeros(0, np.float64))
    with pytest.raises(InvalidRequestError, match="kept=4: expected 0 to 3"):
        codecs.encode(pb.CODEC_TOPK, drawn(3), kept=4)
    with pytest.raises(InvalidRequestError, match="CODEC_RAW"):
        codecs.payload_bytes(0, 3)


# --- factors


PIECES = ((6, 10), (1, 7), (40, 9))


def factored(ranks: tuple[int, ...], seed: int = 0) -> tuple[bytes, np.ndarray]:
    """Returns a payload and the values that it encodes."""
    random, given, expected = np.random.default_rng(seed), [], []
    for (rows, columns), rank in zip(PIECES, ranks, strict=True):
        left = random.standard_normal((rows, rank), np.float32)
        right = random.standard_normal((rank, columns), np.float32)
        whole = random.standard_normal(rows * columns, np.float32)
        given.append((left, right) if rank else whole)
        expected.append((left.astype(np.float64) @ right).reshape(-1) if rank else whole)
    return bytes(codecs.encode_powersgd(given)), np.concatenate(expected)


def multiplied(payload: bytes, shapes: codecs.Shapes = PIECES) -> np.ndarray:
    out = np.full(sum(rows * columns for rows, columns in shapes), 7, np.float32)
    codecs.decode(pb.CODEC_POWERSGD, payload, out, shapes)
    return out


@pytest.mark.parametrize("ranks", [(0, 0, 0), (1, 0, 0), (3, 0, 2), (0, 0, 7)])
def test_factors_are_multiplied_and_other_pieces_are_unchanged(ranks):
    payload, expected = factored(ranks)
    assert len(payload) == codecs.powersgd_bytes(PIECES, ranks)
    np.testing.assert_allclose(multiplied(payload), expected, rtol=1e-5, atol=1e-5)


def test_factors_multiplied_in_tiles_equal_one_product():
    rows, columns = 700, 300
    random = np.random.default_rng(1)
    left, right = (
        random.standard_normal((rows, 3), np.float32),
        random.standard_normal((3, columns), np.float32),
    )
    expected = left[:, :1] * right[:1]
    for index in (1, 2):
        expected += left[:, index : index + 1] * right[index : index + 1]
    np.testing.assert_array_equal(
        multiplied(bytes(codecs.encode_powersgd([(left, right)])), ((rows, columns),)),
        expected.reshape(-1),
    )


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (4, "PAYLOAD_INVALID"),  # 4 * (6 + 10) floats for 60 values
        (2**32 - 1, "PAYLOAD_INVALID"),
        (1, "PAYLOAD_SIZE_MISMATCH"),
        (0, "PAYLOAD_SIZE_MISMATCH"),
    ],
)
def test_impossible_ranks_are_refused(rank, reason):
    payload = factored((2, 0, 2))[0]
    with pytest.raises(InvalidRequestError, match="POWERSGD") as refusal:
        multiplied(rank.to_bytes(4, "little") + payload[4:])
    assert refusal.value.reason == reason


def test_ranks_above_the_limit_are_refused_however_large_the_piece():
    shape, rank = (400, 400), codecs.POWERSGD_LARGEST_RANK
    left, right = np.ones((400, rank + 1), np.float32), np.ones((rank + 1, 400), np.float32)
    assert (
        multiplied(bytes(codecs.encode_powersgd([(left[:, 1:], right[1:])])), (shape,))[0] == rank
    )
    with pytest.raises(InvalidRequestError, match=f"expected at most {rank}"):
        multiplied(bytes(codecs.encode_powersgd([(left, right)])), (shape,))


@given(st.integers(0, 3), st.integers(0, 2), st.data())
def test_factors_with_changed_or_missing_bytes_are_decoded_or_refused(first, last, data):
    payload = bytearray(factored((first, 0, last))[0])
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        multiplied(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    except InvalidRequestError:
        pass


def test_size_that_no_ranks_give_is_refused_before_reading():
    codecs.check_size(pb.CODEC_POWERSGD, 1720, 427, 3)
    for size in (8, 13, 1724):
        with pytest.raises(InvalidRequestError, match="expected a multiple of 4 from 12 to 1720"):
            codecs.check_size(pb.CODEC_POWERSGD, size, 427, 3)


@pytest.mark.parametrize(
    ("piece", "shape"),
    [
        ({"offset": 0, "length": 60, "row": 10}, (6, 10)),
        ({"offset": 20, "length": 40, "row": 10}, (4, 10)),  # cut between rows
        ({"offset": 5, "length": 60, "row": 10}, (1, 60)),  # cut within a row
        ({"offset": 0, "length": 15, "row": 10}, (1, 15)),
        ({"offset": 0, "length": 9, "row": 1}, (1, 9)),
    ],
)
def test_piece_of_complete_rows_is_a_matrix_and_any_other_a_vector(piece, shape):
    assert codecs.piece_shape(**piece) == shape
