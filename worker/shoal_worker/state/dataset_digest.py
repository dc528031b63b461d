"""Whether two ranks' datasets are the same one, as far as that is cheap to say.

Every rank makes its dataset itself, and positions of one order mean nothing in another: `random_split` without a seed, for example, gives
each rank other samples. So what can be told of a dataset without fetching a sample of it goes into a digest that ranks compare: its
length, which samples a subset takes, and the whole numbers (labels, tokens) that a `TensorDataset` holds. Numbers with a fraction are left
out, since machines round them otherwise; so are the samples of all other datasets, which may be slow to make, or be made in data workers
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset

SAMPLES: Final = "what is known of the dataset's samples"
"""In what a loader deals by: its dataset's identity."""
DRAWN: Final = "what the sampler drew"
"""In what a loader deals by: a digest of the epoch's order."""

_ROWS: Final = 1 << 16
"""At most so many rows of a tensor are looked at, evenly spaced."""


def identity_of(dataset: Any) -> str:
    """Digest of what is known of `dataset`. Equal datasets have equal digests; unequal ones may."""
    return xxhash.xxh3_64_hexdigest(repr(_describe(dataset)).encode())


def _describe(dataset: Any) -> object:
    if isinstance(dataset, Subset):
        return "subset", _digest_of_indices(dataset.indices), _describe(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return "concat", [_describe(part) for part in dataset.datasets]
    if type(dataset) is TensorDataset:
        return "tensors", [_describe_tensor(tensor) for tensor in dataset.tensors]
    return len(dataset)


def _digest_of_indices(indices: Sequence[int]) -> str:
    try:
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(indices, dtype=np.int64).data)
    except (TypeError, ValueError, OverflowError):  # keys of a mapping, say, which Subset takes, too
        return str(len(indices))


def _describe_tensor(tensor: torch.Tensor) -> object:
    described = str(tensor.dtype), tuple(tensor.shape)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided or not tensor.numel():
        return described
    rows = tensor.detach()[:: max(1, len(tensor) // _ROWS)].cpu().contiguous()
    return *described, xxhash.xxh3_64_hexdigest(rows.view(torch.uint8).numpy().data)
