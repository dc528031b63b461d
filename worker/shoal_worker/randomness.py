"""Random numbers that do not depend on the number of ranks.

Each batch and micro-batch has a key: (seed, epoch, step, index). The global generators of torch,
NumPy and Python are seeded from it before the batch is handed out, and from (seed, epoch, step)
when a step of `loader.steps()` is handed out. A repeated step therefore draws the same numbers on
any rank, and no generator state has to be restored. (EasyScale, OSDI 2022, section 3:
"EasyScaleThread".)

Generators that the script creates are not seeded or restored, unless the script registers them. In
a loop without a Shoal loader, there are no keys, and the global generators are not seeded either.
There is one exception: ranks that share one replica of the model must draw the same numbers, so
their generators are seeded in each step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash


def derive_seed(key: Sequence[int]) -> int:
    """Returns a 63-bit seed computed from `key`. The function is stable across releases."""
    text = ",".join(str(k) for k in key)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the generators seeded by `seed_generators` to their previous states on
    exit. Takes 0.1 ms, because NumPy's state is slow to save."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    device_state = torch.cuda.default_generators[device].get_state() if device is not None else None
    torch_state, numpy_state, python_state = (
        torch.default_generator.get_state(),
        np.random.get_state(),
        random.getstate(),
    )
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        if device is not None and device_state is not None:
            torch.cuda.default_generators[device].set_state(device_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_generators(key: Sequence[int]) -> None:
    """Seeds Python's and NumPy's generators, torch's CPU generator and, if CUDA is in use, the
    current device's generator. Takes about 12 us.

    `torch.manual_seed` is not used, because it visits every device type of torch and takes 0.1 ms.
    """
    seed = derive_seed(key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    np.random.seed(seed % 2**32)  # 32 bits, because seeding with an array takes 6 times as long
    random.seed(seed)
