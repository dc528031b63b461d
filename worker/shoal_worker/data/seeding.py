"""Random numbers that depend on a key alone, for what makes batches.

Datasets and collate functions draw from torch's, numpy's and Python's global generators. Each batch is fetched under its own key, so that
augmentation is the same in a worker process or inline, in a redo, and (with micro-batches) for any number of ranks. CPU generators only.
They belong to the process: ranks that are threads of one process disturb each other's.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash


def seed(key: Sequence[int]) -> None:
    """Seeds the three global generators from `key`. Other numbers than those that training draws under the same key."""
    digest = xxhash.xxh3_128(b"".join(struct.pack("<Q", part % 2**64) for part in key)).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(int.from_bytes(digest, "little"))


@contextlib.contextmanager
def seeded(key: Sequence[int]) -> Iterator[None]:
    """`seed`, and puts the generators' states back afterwards, which takes 0.1 ms: NumPy's is slow to save."""
    torch_state, numpy_state, python_state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        seed(key)
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
