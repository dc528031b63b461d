"""Compresses values for pulls, with those codecs of shoal_common.formats.codecs that are suitable
for values. Implemented with torch.

Each value is rounded to the nearest representable value, so the result is deterministic: all
readers of a version receive the same bytes, no matter which server responds. The server's own
values keep their precision.
"""

from __future__ import annotations

import math

import torch
from shoal_common.errors import PreconditionError
from shoal_common.formats import codecs
from shoal_common.formats.codecs import INT8_BLOCK, INT8_LARGEST, blocks

from shoal_ps_server.shard.payload import largest_of

_INFINITE_FROM = {codecs.FLOAT16: 65520.0, codecs.BFLOAT16: 2.0**128 - 2.0**119}
"""Codec -> smallest magnitude that it rounds to infinity."""


def encode_values(values: torch.Tensor, codec: int) -> torch.Tensor:
    """Returns the compressed payload of `values` as uint8. `codec`: one of `codecs.FOR_VALUES`.

    Raises PreconditionError / VALUES_TOO_LARGE if a value would become infinite.
    """
    values = values.to(torch.float32)
    largest, limit = largest_of(values), _INFINITE_FROM.get(codec, math.inf)
    if not largest < limit:
        raise PreconditionError(
            f"the largest magnitude among the values is {largest:g}, but {codecs.name(codec)} "
            f"supports only magnitudes below {limit:g}; pull them with another codec, or "
            "CODEC_RAW",
            reason="VALUES_TOO_LARGE",
        )
    count = values.numel()
    payload = torch.zeros(codecs.payload_bytes(codec, count), dtype=torch.uint8)
    if codec == codecs.INT8:
        _encode_int8(values, payload)
    else:
        payload[: 2 * count].view(
            torch.float16 if codec == codecs.FLOAT16 else torch.bfloat16
        ).copy_(values)
    return payload


def _encode_int8(values: torch.Tensor, payload: torch.Tensor) -> None:
    count, rows = values.numel(), blocks(values.numel(), INT8_BLOCK)
    scales, levels = (
        payload[: 4 * rows].view(torch.float32),
        payload[4 * rows : 4 * rows + count].view(torch.int8),
    )
    filled = torch.zeros(rows * INT8_BLOCK)
    filled[:count] = values
    blocked = filled.view(rows, INT8_BLOCK)
    largest = blocked.abs().amax(dim=1)
    # A magnitude so small that its scale would lose almost all of its precision becomes zero, as in
    # pushes.
    scales.copy_(
        torch.where(largest < torch.finfo(torch.float32).tiny * 256, 0.0, largest / INT8_LARGEST)
    )
    blocked.mul_(torch.where(scales > 0, 1 / scales, 0.0)[:, None]).round_().clamp_(
        -INT8_LARGEST, INT8_LARGEST
    )
    levels.copy_(filled[:count])
