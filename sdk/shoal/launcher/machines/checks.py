"""Program that checks the health of a machine: `python -m shoal.launcher.machines.checks
DIRECTORY`.

It prints one JSON object per check: name, ok, detail. A check that crashes or hangs affects only
this process. The program imports nothing of Shoal, so that it starts quickly.

The matrices to multiply consist of small integers, so that every sum is exact in float32 (and in
TF32). The result therefore does not depend on the order of additions, and any difference is a
hardware error. Products are verified in int64 arithmetic with Freivalds' algorithm (Freivalds,
"Probabilistic machines can use less running time", IFIP 1977).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b

import torch

_DISK_BYTES = 64 << 20
_PIECE = 1 << 20
_COPY_BYTES = 256 << 20
_SLOWEST_COPY = 200e6
"""Slowest acceptable copy in bytes per second. Healthy memory is at least ten times as fast, even
on a busy machine."""
_SIZE = 1024
_ROUNDS = 8
_LARGEST_ENTRY = 8
"""Largest entry of a matrix. A sum is at most 8 * 8 * 1024 < 2**24, which float32 represents
exactly."""


class Failed(Exception):
    """Raised if a check fails; the message is the reason."""


def disk(directory: str) -> str:
    """Writes a file, reads it back from the device, and compares the contents."""
    began = time.monotonic()
    with tempfile.TemporaryFile(dir=directory) as file:
        for number in range(_DISK_BYTES // _PIECE):
            file.write(_piece(number))
        file.flush()
        os.fsync(file.fileno())
        wrote_s = time.monotonic() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from the page cache
        file.seek(0)
        for number in range(_DISK_BYTES // _PIECE):
            if file.read(_PIECE) != _piece(number):
                raise Failed(f"{directory}: MiB {number} of a file differs from what was written")
    return f"{_DISK_BYTES / wrote_s / 1e6:,.0f} MB/s written in {directory}"


def _piece(number: int) -> bytes:
    return blake2b(b"%d" % number).digest() * (_PIECE // 64)


def memory() -> str:
    """Copies a large tensor, compares the copy and measures the bandwidth."""
    original = torch.arange(_COPY_BYTES // 8, dtype=torch.int64)
    copy = torch.empty_like(original)
    copy.copy_(original)  # touches all pages
    began = time.monotonic()
    copy.copy_(original)
    rate = 2 * _COPY_BYTES / (time.monotonic() - began)
    if not torch.equal(copy, original):
        raise Failed("a copy in memory differs from its original")
    if rate < _SLOWEST_COPY:
        raise Failed(f"{rate / 1e9:.2f} GB/s; expected at least {_SLOWEST_COPY / 1e9:.1f} GB/s")
    return f"{rate / 1e9:.1f} GB/s"


def matrix(device: str = "cpu") -> str:
    """Multiplies matrices on a device and verifies the products with exact arithmetic."""
    rows = torch.arange(_SIZE, dtype=torch.int64)
    began = time.monotonic()
    for number in range(_ROUNDS):
        left = (rows[:, None] * 31 + rows * (17 + number)) % _LARGEST_ENTRY
        right = (rows[:, None] * (7 + number) + rows * 13) % _LARGEST_ENTRY
        vector = (rows * 29 + number) % 11 + 1
        product = left.float().to(device) @ right.float().to(device)
        expected = left @ (right @ vector)
        wrong = (product.to("cpu", torch.int64) @ vector != expected).nonzero()
        if len(wrong):
            raise Failed(
                f"product {number} of {_SIZE}x{_SIZE} matrices is wrong in {len(wrong)} rows, "
                f"first in row {int(wrong[0])}"
            )
    return f"{_ROUNDS} products of {_SIZE}x{_SIZE} matrices in {time.monotonic() - began:.2f} s"


def gpu_memory(device: str) -> str:
    """Copies a tensor to a GPU, within the GPU and back, and compares the result with the
    original."""
    original = torch.arange(_COPY_BYTES // 8, dtype=torch.int64)
    there = original.to(device)
    if not torch.equal((there.clone() - 1).cpu(), original - 1):
        raise Failed("a tensor that was copied to the device and back differs from its original")
    return f"{_COPY_BYTES >> 20} MiB copied to the device and back"


def nccl(devices: list[str]) -> str:
    """Sums a tensor over all devices of this machine with NCCL."""
    from torch.cuda import nccl as library

    tensors = [torch.full((1 << 20,), float(2**n), device=each) for n, each in enumerate(devices)]
    library.all_reduce(tensors)
    for device, tensor in zip(devices, tensors, strict=True):
        if not bool((tensor == 2 ** len(devices) - 1).all()):
            raise Failed(f"the sum over {len(devices)} GPUs is wrong on {device}")
    return f"summed over {len(devices)} GPUs"


def checks(directory: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name and the function of each check. The function returns a human-readable
    measurement, or raises an exception if the check fails."""
    yield "disk", partial(disk, directory)
    yield "memory", memory
    yield "matrix product", matrix
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in devices:
        yield f"matrix product on {device}", partial(matrix, device)
        yield f"memory of {device}", partial(gpu_memory, device)
    if devices and torch.cuda.nccl.is_available([torch.empty(0, device=each) for each in devices]):
        yield "NCCL", partial(nccl, devices)


def main() -> None:
    for name, check in checks(sys.argv[1]):
        try:
            ok, detail = True, check()
        except (Failed, OSError, RuntimeError, MemoryError) as error:
            ok, detail = False, str(error).splitlines()[0] if str(error) else repr(error)
        # read by the launcher
        print(json.dumps({"name": name, "ok": ok, "detail": detail}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
