"""Configures glibc's malloc to keep freed memory, for processes that move megabytes of data.

By default, glibc returns freed memory at the top of its heap to the kernel, and takes it back, page
fault by page fault, for the next message. gRPC allocates and frees every message that it receives,
so page faults dominated large transfers: a push and pull of 64 MiB took 3 to 10 times the processor
time of the copies themselves (docs/explanation/backends.md#memory). A training step likewise frees
its gradients and the temporary tensors of its optimizer. Other C libraries are not affected.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3

KEPT_BYTES: Final = 256 << 20
"""Maximum amount of freed memory that is kept at the top of a heap."""

_GROWTH_BYTES: Final = 16 << 20
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
"""Largest value that glibc accepts on 64-bit machines."""


def keep_freed_memory() -> bool:
    """Configures malloc for the entire process. Should be called once, early.

    Returns False if nothing was changed: the C library is not glibc or refuses, or the environment
    already configures malloc (MALLOC_TRIM_THRESHOLD_ and similar, or GLIBC_TUNABLES), which takes
    precedence.
    """
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
