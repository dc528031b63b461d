"""Telling glibc's malloc to keep what is freed: what a process needs through which megabytes come
and go.

By default glibc gives freed memory at the top of its heap back to the kernel and takes it again,
page fault by page fault, for the next message. gRPC allocates and frees every message it receives,
so most of the time of a large transfer went into page faults: a push and pull of 64 MiB took 3 to
10 times the processor time of the copies themselves (docs/decisions/0030). A training step frees
its gradients, and what its optimizer computes on the way, in the same manner. Other C libraries are
left alone.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3

KEPT_BYTES: Final = 256 << 20
"""At most so much freed memory at the top of a heap stays with the process."""

_GROWTH_BYTES: Final = 16 << 20
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
"""glibc takes no higher one on 64-bit machines."""


def keep_freed_memory() -> bool:
    """Call once, early; affects the whole process. False where the C library is not glibc, or
    refuses, or where the environment says how malloc is to be (MALLOC_TRIM_THRESHOLD_ and its like,
    or GLIBC_TUNABLES): then that holds."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
