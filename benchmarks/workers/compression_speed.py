"""Measures the speed of each compressor on one core, for a bucket of 64 MiB of normally distributed
float32 values. Prints a Markdown table.

    OMP_NUM_THREADS=1 python -m benchmarks.workers.compression_speed

Measures the CPU time of the fastest of several rounds, so that other work on the machine has little
influence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from shoal_worker.compression import compressor_class, compressor_names
from shoal_worker.compression.base import KeyedRandom

NUMEL = 16 << 20
MATRIX = (4096, 4096)
ROUNDS = 7


def best_s(work: Callable[[], object]) -> float:
    """Returns the CPU time of `work` in seconds, in the fastest of several rounds."""
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def row(name: str, *seconds: float) -> str:
    return f"| {name} | " + " | ".join(f"{NUMEL * 4 / 1e6 / one:,.0f}" for one in seconds) + " |"


def compressor_row(name: str, values: torch.Tensor, out: torch.Tensor) -> str:
    compressor, shape = compressor_class(name)(), MATRIX if name == "powersgd" else (NUMEL,)
    given, target = values.view(shape), out.view(shape)
    payload = torch.empty(compressor.payload_bytes(shape), dtype=torch.uint8)
    times = (
        best_s(lambda: compressor.compress_into(given, payload, KeyedRandom(0))),
        best_s(lambda: compressor.decompress_into(payload, target)),
        best_s(lambda: compressor.decompress_into(payload, target, alpha=1.0)),
    )
    return (
        f"{row(name, *times)} "
        f"{compressor.wire_bytes(NUMEL, 4, [shape]) / (2 * 3 / 4 * 4 * NUMEL):.1%} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    values, out = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)), torch.empty(NUMEL)
    print(
        "| MB/s of float32 | compress | decompress | decompress and add | bytes sent, of float32's "
        "|\n|---|---|---|---|---|"
    )
    copied = best_s(lambda: out.copy_(values))
    print(row("memcpy", copied, copied, best_s(lambda: out.add_(values))), "100 % |")
    for name in compressor_names():
        print(compressor_row(name, values, out))
    kept, array = NUMEL // 100, values.numpy()
    print("\n| the largest 1 % | ms |\n|---|---|")
    compressor = compressor_class("topk")()
    payload = torch.empty(compressor.payload_bytes((NUMEL,)), dtype=torch.uint8)
    for name, work in (
        ("torch.topk", lambda: torch.topk(values.abs(), kept, sorted=False)),
        ("numpy.argpartition", lambda: np.argpartition(np.abs(array), NUMEL - kept)),
        (
            "threshold of a sample (with the payload)",
            lambda: compressor.compress_into(values, payload, KeyedRandom(0)),
        ),
    ):
        print(f"| {name} | {best_s(work) * 1e3:.0f} |")


if __name__ == "__main__":
    main()
