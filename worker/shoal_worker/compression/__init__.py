"""Gradient compression: reduces traffic at the cost of a bounded error, which later steps can
compensate for.

A `GradientCompressor` converts a tensor to a payload and back. `CompressedReduction` uses a
compressor to sum buckets of gradients across ranks. All ranks get bitwise equal results, and each
keeps its compression error for later steps (error feedback). `parse_compression` reads the user's
setting.

- `quantized`, `sign`, `sparse`, `powersgd`: the compressors, based on `base`. `registry` lists them
  by name; with `compressing_optimizer`, a script can choose one together with the optimizer.
- `compressed_reduction` sums gradients across ranks, `pushes` encodes pushes to parameter servers,
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
