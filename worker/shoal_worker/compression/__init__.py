"""Gradient compression: fewer bytes on the wire for an error that is bounded and, where it has to
be, made up for in later steps.

A `GradientCompressor` turns a tensor into a payload and back. `CompressedReduction` sums buckets of
gradients over ranks with one, so that every rank ends with the same bits, and keeps what
compression left out (error feedback). `parse_compression` reads what users write.

The compressors are in `quantized`, `sign`, `sparse` and `powersgd`, over `base`, and `registry` has
them by name; `optimizer` is the other way to name one. `reduction` sums over ranks, `pushes` sends
to parameter servers, and `memory` is what compression leaves behind.
"""

from __future__ import annotations

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.reduction import CompressedReduction, Reduction
from shoal_worker.compression.registry import compressor_class, compressor_names, parse_compression

__all__ = [
    "CompressedReduction",
    "GradientCompressor",
    "Reduction",
    "compressor_class",
    "compressor_names",
    "parse_compression",
]
