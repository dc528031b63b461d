"""Compressed gradients as bytes: reads and writes the layout of each `shoal.v1.Codec` with numpy.

Only this module defines the layouts. Parameter servers decode pushes with it, and clients without
torch encode with it. The worker's compressors (shoal_worker.compression) write the same bytes from
torch tensors, on the CPU or a device; their docstrings describe what a codec omits or rounds, and
how the error is compensated.

Every codec encodes float32 values. All numbers are little-endian. A payload is padded with zero
bytes to a multiple of 4. n: number of values.

    RAW       float32[n]                       (a header may specify other dtypes; this module does
                                               not handle those)
    FLOAT16   float16[n]
    BFLOAT16  uint16[n]                        the upper halves of the float32s, rounded to nearest
                                               even
    INT8      float32[ceil(n / 256)]           a scale per block of 256 values
              int8[n]                          value = scale * int8
    SIGN      float32[ceil(n / 1024)]          a magnitude per block of 1024 values
              bits[n], lowest first            1: value = -magnitude; 0: value = +magnitude
    TOPK      uint32[ceil(n / 65536)]          number of the k kept values in each block of 65536
              float32[k]                       the kept values, in ascending order of their indices
              uint16[k]                        index within the block
    RANDOMK   uint64 start, uint64 stride      start < n; stride and n have no common divisor
              float32[k]                       value j has the index (start + j * stride) mod n
    POWERSGD  uint32[pieces]                   the rank r of each piece; 0: uncompressed
              float32 ..., piece after piece: all values if r is 0, otherwise P (rows x r) and Q
              (r x columns), row by row; the piece is P Q, a sum of r products in the order of r

For POWERSGD the values are pieces of tensors, and `shapes` contains the rows and columns of each
piece (`piece_shape`). For the other codecs the values are one vector.

A NaN or infinite value is decoded as NaN or infinite. With INT8 and SIGN the rest of its block
becomes NaN or infinite too, with POWERSGD the rest of its piece. RANDOMK might omit such a value
and therefore sends NaN for all values.

Decoding writes into memory provided by the caller, so no payload can cause further allocations.
Every machine decodes a payload to the same bits. This is necessary because a push is decoded again
by a server that recovers, by the server's backup, and by the sender, which keeps what the codec has
omitted. The products of POWERSGD are therefore added one at a time: the rounding of a BLAS matrix
product depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_common.errors import ConfigurationError, InvalidRequestError
from shoal_common.formats.wire import as_bytes

UNSPECIFIED: Final[int] = pb.CODEC_UNSPECIFIED
RAW: Final[int] = pb.CODEC_RAW
FLOAT16: Final[int] = pb.CODEC_FLOAT16
BFLOAT16: Final[int] = pb.CODEC_BFLOAT16
INT8: Final[int] = pb.CODEC_INT8
SIGN: Final[int] = pb.CODEC_SIGN
TOPK: Final[int] = pb.CODEC_TOPK
RANDOMK: Final[int] = pb.CODEC_RANDOMK
POWERSGD: Final[int] = pb.CODEC_POWERSGD

FOR_VALUES: Final = (FLOAT16, BFLOAT16, INT8)
"""Codecs allowed in pulls. Their error in each value is proportional to that value or to the
largest value of its block. The other codecs omit values. Later pushes make up for omissions in a
push; pulls have no such correction."""
INT8_BLOCK: Final = 256
INT8_LARGEST: Final = 127
SIGN_BLOCK: Final = 1024
TOPK_BLOCK: Final = 65536
RANDOMK_HEADER_BYTES: Final = 16
POWERSGD_LARGEST_RANK: Final = 64
"""Maximum rank of a piece. Decoding a piece makes as many passes over it as its rank, and blocks
the server."""
_TILE: Final = 1 << 16
"""Number of values processed at a time, so that they stay in the processor's cache."""

Shapes = Sequence[tuple[int, int]]
"""Number of rows and columns of each piece."""
Values = NDArray[np.float32]

_F4, _F2, _U2, _U4, _U8, _I1 = (
    np.dtype(name) for name in ("<f4", "<f2", "<u2", "<u4", "<u8", "i1")
)
_NAN_BFLOAT16: Final = 0x7FC0


def blocks(length: int, block: int) -> int:
    """Returns the number of blocks needed for `length` values. `block`: number of values per
    block."""
    return -(-length // block)


def piece_shape(*, offset: int, length: int, row: int) -> tuple[int, int]:
    """Returns the number of rows and columns of a range of elements of a flattened tensor. A range
    that splits a row counts as one row. A range of a vector also counts as one row, since factoring
    it would not reduce its size.

    `row`: number of elements per index of the tensor's first dimension.
    """
    return (
        (length // row, row) if row > 1 and offset % row == 0 and length % row == 0 else (1, length)
    )


def payload_bytes(codec: int, length: int, kept: int = 0) -> int:
    """Returns the size of the payload of `length` values. For POWERSGD call `powersgd_bytes`, since
    the size depends on the ranks.

    `kept`: k, for TOPK and RANDOMK.

    Raises:
        InvalidRequestError (CODEC_UNSUPPORTED): `codec` is unknown or POWERSGD.
    """
    sizes: dict[int, int] = {
        RAW: 4 * length,
        FLOAT16: 2 * length,
        BFLOAT16: 2 * length,
        INT8: 4 * blocks(length, INT8_BLOCK) + length,
        SIGN: 4 * blocks(length, SIGN_BLOCK) + blocks(length, 8),
        TOPK: 4 * blocks(length, TOPK_BLOCK) + 6 * kept,
        RANDOMK: RANDOMK_HEADER_BYTES + 4 * kept,
    }
    if codec not in sizes:
        raise _unsupported(codec)
    return 4 * blocks(sizes[codec], 4)


def powersgd_bytes(shapes: Shapes, ranks: Sequence[int]) -> int:
    """Returns the size of a POWERSGD payload. `shapes`: rows and columns of each piece. `ranks`:
    rank of each piece; 0: an uncompressed piece."""
    floats = (
        rank * (rows + columns) if rank else rows * columns
        for (rows, columns), rank in zip(shapes, ranks, strict=True)
    )
    return 4 * (len(shapes) + sum(floats))


# ----------------------------------------------------------------------------------------- decoding


def decode(codec: int, payload: memoryview | bytes, out: Values, shapes: Shapes = ()) -> None:
    """Writes the values of a payload to `out`, a contiguous float32 array with the known length of
    the tensor. After an error, the contents of `out` are undefined. The caller must check that the
    values are finite.

    `shapes`: for POWERSGD, the shapes of the pieces in `out`; empty: a single vector.

    Raises:
        InvalidRequestError: CODEC_UNSUPPORTED; PAYLOAD_SIZE_MISMATCH if the payload does not match
            `out`'s length; PAYLOAD_INVALID for indices outside of the tensor, duplicate indices,
            and ranks that a piece cannot have. Transports protect payloads with a checksum, so such
            a payload was already wrong when it was sent.
    """
    if out.dtype != np.float32 or out.ndim != 1 or not out.flags.c_contiguous:
        raise ConfigurationError(
            f"cannot decode into {out.dtype} of shape {out.shape}; expected a contiguous "
            "one-dimensional float32 array"
        )
    shapes = shapes or ((1, out.size),)
    if sum(rows * columns for rows, columns in shapes) != out.size:
        raise ConfigurationError(
            f"cannot decode pieces of shapes {shapes} into {out.size} values; expected as "
            "many values as the pieces have"
        )
    data = as_bytes(memoryview(payload))
    check_size(codec, data.nbytes, out.size, len(shapes))
    if codec == POWERSGD:
        _decode_powersgd(data, out, shapes)
    else:
        _DECODERS[codec](data, out)


def check_size(codec: int, size: int, length: int, pieces: int = 1) -> None:
    """Checks that `size` bytes is a possible size for a payload of `length` values, which consists
    of `pieces` pieces. A sparse codec may keep any number of values. For POWERSGD, the exact size
    is known only after the ranks have been read.

    Raises:
        InvalidRequestError: CODEC_UNSUPPORTED or PAYLOAD_SIZE_MISMATCH.
    """
    if codec == POWERSGD:
        if size % 4 or not 4 * pieces <= size <= 4 * (pieces + length):
            raise InvalidRequestError(
                f"a {name(codec)} payload for {length} values in {pieces} pieces has {size} "
                f"bytes; expected a multiple of 4 from {4 * pieces} to {4 * (pieces + length)}",
                reason="PAYLOAD_SIZE_MISMATCH",
            )
        return
    kept = _kept(codec, size, length)
    expected = payload_bytes(codec, length, kept)
    if size != expected or kept > length:
        raise InvalidRequestError(
            f"a {name(codec)} payload for {length} values has {size} bytes; expected {expected} "
            "bytes" + (f" and at most {length} kept values, not {kept}" if kept > length else ""),
            reason="PAYLOAD_SIZE_MISMATCH",
        )


def _kept(codec: int, size: int, length: int) -> int:
    """Computes from the size of a payload how many values it contains. The caller must then check
    that a payload with this many values has exactly `size` bytes."""
    if codec == TOPK:
        return max(0, size - 4 * blocks(length, TOPK_BLOCK)) // 6
    return max(0, size - RANDOMK_HEADER_BYTES) // 4 if codec == RANDOMK else 0


def _decode_raw(data: memoryview, out: Values) -> None:
    out[:] = np.frombuffer(data, _F4)


def _decode_float16(data: memoryview, out: Values) -> None:
    out[:] = np.frombuffer(data, _F2, out.size)


def _decode_bfloat16(data: memoryview, out: Values) -> None:
    bits = out.view(np.uint32)
    bits[:] = np.frombuffer(data, _U2, out.size)
    bits <<= 16


def _decode_int8(data: memoryview, out: Values) -> None:
    count = blocks(out.size, INT8_BLOCK)
    out[:] = np.frombuffer(data, _I1, out.size, 4 * count)
    _scale_blocks(out, np.frombuffer(data, _F4, count), INT8_BLOCK)


def _decode_sign(data: memoryview, out: Values) -> None:
    count = blocks(out.size, SIGN_BLOCK)
    bits = np.unpackbits(
        np.frombuffer(data, np.uint8, blocks(out.size, 8), 4 * count),
        count=out.size,
        bitorder="little",
    )
    np.multiply(bits, np.float32(-2), out=out)
    out += 1
    _scale_blocks(out, np.frombuffer(data, _F4, count), SIGN_BLOCK)


def _scale_blocks(out: Values, scales: NDArray[Any], block: int) -> None:
    whole = out.size // block
    with np.errstate(all="ignore"):  # infinities and NaN are passed on without warnings
        out[: whole * block].reshape(whole, block)[:] *= scales[:whole, None]
        out[whole * block :] *= scales[whole:]


def _decode_topk(data: memoryview, out: Values) -> None:
    count = blocks(out.size, TOPK_BLOCK)
    counts = np.frombuffer(data, _U4, count)
    kept = (data.nbytes - 4 * count) // 6
    if int(counts.sum(dtype=np.uint64)) != kept:
        raise InvalidRequestError(
            f"the block counts of a TOPK payload add up to {counts.sum(dtype=np.uint64)} "
            f"values, but it contains {kept}",
            reason="PAYLOAD_INVALID",
        )
    places = np.repeat(np.arange(count, dtype=np.int64) * TOPK_BLOCK, counts)
    places += np.frombuffer(data, _U2, kept, 4 * count + 4 * kept)
    if kept and (places[-1] >= out.size or not (places[1:] > places[:-1]).all()):
        raise InvalidRequestError(
            "the positions in a TOPK payload are invalid; expected strictly ascending positions "
            f"below {out.size}",
            reason="PAYLOAD_INVALID",
        )
    out[:] = 0
    out[places] = np.frombuffer(data, _F4, kept, 4 * count)


def _decode_randomk(data: memoryview, out: Values) -> None:
    start, stride = (int(number) for number in np.frombuffer(data, _U8, 2))
    values = np.frombuffer(data, _F4, offset=RANDOMK_HEADER_BYTES)
    if start >= max(1, out.size) or stride >= max(2, out.size) or math.gcd(stride, out.size) != 1:
        # the message is also correct for an empty array
        raise InvalidRequestError(
            f"a RANDOMK payload for {out.size} values starts at {start} with stride {stride}; "
            "expected both below the number of values, and a stride coprime to it",
            reason="PAYLOAD_INVALID",
        )
    out[:] = 0
    out[randomk_places(start, stride, values.size, out.size)] = values


def _decode_powersgd(data: memoryview, out: Values, shapes: Shapes) -> None:
    numbers = np.frombuffer(data, _F4)
    ranks = [int(rank) for rank in np.frombuffer(data, _U4, len(shapes))]
    for (rows, columns), rank in zip(shapes, ranks, strict=True):
        if rank > POWERSGD_LARGEST_RANK or rank * (rows + columns) > rows * columns:
            raise InvalidRequestError(
                f"a POWERSGD payload has rank {rank} for a piece of {rows} x {columns}; expected "
                f"at most {POWERSGD_LARGEST_RANK}, or 0 (no factors) if factors would be larger "
                "than the piece",
                reason="PAYLOAD_INVALID",
            )
    if data.nbytes != (expected := powersgd_bytes(shapes, ranks)):
        raise InvalidRequestError(
            f"a POWERSGD payload has {data.nbytes} bytes; expected {expected} for the matrix ranks "
            "that it specifies",
            reason="PAYLOAD_SIZE_MISMATCH",
        )
    at, begin = len(shapes), 0
    for (rows, columns), rank in zip(shapes, ranks, strict=True):
        end = begin + rows * columns
        if rank:
            right_at, next_at = at + rows * rank, at + (rows + columns) * rank
            left, right = (
                numbers[at:right_at].reshape(rows, rank),
                numbers[right_at:next_at].reshape(rank, columns),
            )
            _multiply(left, right, out[begin:end].reshape(rows, columns))
        else:
            next_at = at + rows * columns
            out[begin:end] = numbers[at:next_at]
        at, begin = next_at, end


def _multiply(left: NDArray[Any], right: NDArray[Any], out: Values) -> None:
    """Writes the matrix product of `left` and `right` to `out`. The products are added in the order
    of the rank, so that each operation is rounded according to IEEE 754 on any machine."""
    rows, columns = out.shape
    step = max(1, _TILE // columns)
    product = np.empty((min(step, rows), columns), np.float32)
    with np.errstate(all="ignore"):  # infinities and NaN are passed on without warnings
        for start in range(0, rows, step):
            tile, factors = out[start : start + step], left[start : start + step]
            np.multiply(factors[:, :1], right[:1], out=tile)
            for index in range(1, right.shape[0]):
                tile += np.multiply(
                    factors[:, index : index + 1],
                    right[index : index + 1],
                    out=product[: len(tile)],
                )


_DECODERS: Final[Mapping[int, Callable[[memoryview, Values], None]]] = {
    RAW: _decode_raw,
    FLOAT16: _decode_float16,
    BFLOAT16: _decode_bfloat16,
    INT8: _decode_int8,
    SIGN: _decode_sign,
    TOPK: _decode_topk,
    RANDOMK: _decode_randomk,
}


# ----------------------------------------------------------------------------------------- encoding


def encode(codec: int, values: Values, *, kept: int = 0, seed: int = 0) -> memoryview:
    """Encodes a one-dimensional float32 array. For POWERSGD call `encode_powersgd`.

    `kept`: k, for TOPK and RANDOMK. `seed`: seed for INT8's rounding and RANDOMK's indices.

    Raises:
        InvalidRequestError: CODEC_UNSUPPORTED; or `kept` is not between 0 and the number of values.
    """
    if not 0 <= kept <= values.size:
        raise InvalidRequestError(f"kept={kept}: expected 0 to {values.size}, the number of values")
    payload = np.zeros(payload_bytes(codec, values.size, kept), np.uint8)
    parts = _ENCODERS[codec](values.astype(_F4, copy=False), kept, np.random.default_rng(seed))
    position = 0
    for part in parts:
        payload[position : position + part.nbytes] = np.ascontiguousarray(part).view(np.uint8)
        position += part.nbytes
    return payload.data


def encode_powersgd(pieces: Sequence[Values | tuple[Values, Values]]) -> memoryview:
    """Encodes pieces as a POWERSGD payload. A piece is either an uncompressed one-dimensional array
    or a pair of P (rows x r) and Q (r x columns)."""
    ranks = [piece[0].shape[1] if isinstance(piece, tuple) else 0 for piece in pieces]
    parts = [part for piece in pieces for part in (piece if isinstance(piece, tuple) else (piece,))]
    return (
        np.concatenate(
            [
                np.array(ranks, _U4).view(_F4),
                *(part.astype(_F4, copy=False).reshape(-1) for part in parts),
            ]
        )
        .view(np.uint8)
        .data
    )


def _encode_float16(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    with np.errstate(over="ignore"):  # values that are too large become infinite without a warning
        return [values.astype(_F2)]


def _encode_bfloat16(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return [np.where(np.isnan(values), _NAN_BFLOAT16, rounded).astype(_U2)]


def _encode_int8(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    rows = _in_blocks(values, INT8_BLOCK)
    with np.errstate(all="ignore"):
        largest = np.abs(rows).max(axis=1)
        scales = np.where(
            np.isfinite(largest), largest / np.float32(INT8_LARGEST), np.float32(np.nan)
        ).astype(_F4)
        # A magnitude so small that its scale would lose almost all of its precision becomes zero.
        # Otherwise the quotient would not fit into int8.
        scales[largest < np.finfo(np.float32).tiny * 256] = 0
        inverse = np.where(scales > 0, 1 / scales, 0)[:, None].astype(np.float32)
        levels = np.floor(rows * inverse + random.random(rows.shape, np.float32))
        levels = np.clip(np.nan_to_num(levels), -INT8_LARGEST, INT8_LARGEST)
    return [scales, levels.astype(_I1).reshape(-1)[: values.size]]


def _encode_sign(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    rows = _in_blocks(values, SIGN_BLOCK)
    held = np.minimum(SIGN_BLOCK, values.size - SIGN_BLOCK * np.arange(len(rows)))
    return [
        (np.abs(rows).sum(axis=1) / held).astype(_F4),
        np.packbits(values < 0, bitorder="little"),
    ]


def _encode_topk(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    magnitudes = np.abs(values)  # NaN sorts last, as the largest
    places = (
        np.sort(np.argpartition(magnitudes, values.size - kept)[values.size - kept :])
        if kept
        else np.empty(0, np.int64)
    )
    counts = np.bincount(places // TOPK_BLOCK, minlength=blocks(values.size, TOPK_BLOCK))
    return [counts.astype(_U4), values[places], (places % TOPK_BLOCK).astype(_U2)]


def _encode_randomk(values: Values, kept: int, random: np.random.Generator) -> list[NDArray[Any]]:
    start, stride = randomk_draw(random, values.size)
    chosen = values[randomk_places(start, stride, kept, values.size)]
    return [
        np.array([start, stride], _U8),
        chosen if np.isfinite(values).all() else np.full_like(chosen, np.nan),
    ]


_ENCODERS: Final[Mapping[int, Callable[[Values, int, np.random.Generator], list[NDArray[Any]]]]] = {
    RAW: lambda values, kept, random: [values],
    FLOAT16: _encode_float16,
    BFLOAT16: _encode_bfloat16,
    INT8: _encode_int8,
    SIGN: _encode_sign,
    TOPK: _encode_topk,
    RANDOMK: _encode_randomk,
}


def randomk_draw(random: np.random.Generator, length: int) -> tuple[int, int]:
    """Draws a start and a stride for RANDOMK over `length` values, such that for any k, each index
    is equally likely to be among the k kept ones."""
    if length < 2:
        return 0, 1
    start = int(random.integers(length))
    while True:
        stride = int(random.integers(1, length))
        if math.gcd(stride, length) == 1:
            return start, stride


def randomk_places(start: int, stride: int, kept: int, length: int) -> NDArray[np.int64]:
    """Returns the indices of the values that RANDOMK keeps. The indices are distinct. Tensors have
    fewer than 2^31 values, so the products stay below 2^63."""
    return (start + np.arange(kept, dtype=np.int64) * stride) % max(1, length)


def _in_blocks(values: Values, block: int) -> Values:
    """Returns the values as an array with one block per row. The last block is padded with
    zeros."""
    rows = np.zeros((blocks(values.size, block), block), np.float32)
    rows.reshape(-1)[: values.size] = values
    return rows


def name(codec: int) -> str:
    """Returns a codec's name in the protocol, or its number if it has none."""
    return pb.Codec.Name(codec) if codec in pb.Codec.values() else str(codec)


def _unsupported(codec: int) -> InvalidRequestError:
    known = ", ".join(pb.Codec.Name(known) for known in (*_DECODERS, POWERSGD) if known != codec)
    return InvalidRequestError(
        f"codec {name(codec)}: expected one of {known}", reason="CODEC_UNSUPPORTED"
    )
