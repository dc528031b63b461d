"""Random numbers that do not depend on how many ranks share a step.

Each batch and micro-batch has a key, (seed, epoch, step, index), and torch's generators are seeded from it before it is handed out. A
step that is done again therefore draws the same numbers, on whatever rank. (EasyScale, OSDI 2022, section 3: "EasyScaleThread".)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash


def derive_seed(key: Sequence[int]) -> int:
    """A 63-bit seed from `key`; fixed for ever."""
    text = ",".join(str(k) for k in key)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def seed_generators(key: Sequence[int]) -> None:
    """Seeds torch's CPU generator and, where CUDA is in use, the current device's.

    Not `torch.manual_seed`, which visits every device type torch knows and takes 0.1 ms.
    """
    seed = derive_seed(key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
