"""Random numbers that depend on a key alone, for whatever runs inside, and leave no trace outside.

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


@contextlib.contextmanager
def seeded(key: Sequence[int]) -> Iterator[None]:
    """Seeds the three global generators from `key` and puts their states back afterwards."""
    digest = xxhash.xxh3_128(b"".join(struct.pack("<Q", part % 2**64) for part in key)).digest()
    torch_state, numpy_state, python_state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        np.random.seed(np.frombuffer(digest, dtype="<u4"))
        random.seed(digest)
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
