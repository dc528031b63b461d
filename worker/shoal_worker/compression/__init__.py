"""Gradient compression: less traffic at the cost of an error that is bounded and, if necessary,
compensated in later steps.

A `GradientCompressor` turns a tensor into a payload and back. `CompressedReduction` sums buckets of
gradients over ranks with one, with bitwise equal results on every rank, and keeps the compression
error (error feedback). `parse_compression` reads the user's setting.

The compressors are in `quantized`, `sign`, `sparse` and `powersgd`, on top of `base`, and
`registry` lists them by name; `optimizer` is an alternative way to select one. `reduction` sums
over ranks, `pushes` encodes pushes to parameter servers, and `memory` holds the state of
compression between steps.
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
