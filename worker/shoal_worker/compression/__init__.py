"""Gradient compression: reduces traffic at the cost of a bounded error, which later steps can make
up for.

A `GradientCompressor` converts a tensor to a payload and back. `CompressedReduction` uses a
compressor to sum buckets of gradients across ranks, with bitwise equal results on every rank, and
keeps the compression error for later steps (error feedback). `parse_compression` reads the user's
setting.

The compressors are in `quantized`, `sign`, `sparse` and `powersgd`, on top of `base`. `registry`
lists them by name; `compressing_optimizer` offers a second way to select one.
`compressed_reduction` sums gradients across ranks, `pushes` encodes pushes to parameter servers,
and `memory` stores the compression state between steps.
"""

from __future__ import annotations

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.compressed_reduction import CompressedReduction, Reduction
from shoal_worker.compression.registry import compressor_class, compressor_names, parse_compression

__all__ = [
    "CompressedReduction",
    "GradientCompressor",
    "Reduction",
    "compressor_class",
    "compressor_names",
    "parse_compression",
]
