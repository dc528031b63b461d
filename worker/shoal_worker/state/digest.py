"""Digests of states: equal states have equal digests in every process, whatever order their dicts were filled in.

Used to tell whether two members hold the same state under one name, and to find damage in files and transfers. It protects against
accidents, not against an adversary: xxh3 is no cryptographic hash.

What counts: types, values and the order of sequences and OrderedDicts, and of each tensor its dtype, shape and bytes. What does not: the
order of other dicts, the names tensors have, where they lie, and whether equal tensors are one object or two.

Datasets have digests as well: see `identity_of`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash
from shoal_common.errors import CorruptDataError
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from shoal_worker.state.tree import Json, flatten


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order as bytes. No copy for a contiguous CPU tensor (the view then is writable and shares its
    memory); any other is copied to one first."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> int:
    """64-bit digest of dtype, shape and bytes."""
    state = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(bytes_of(tensor))
    return state.intdigest()


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """64-bit digest of the bytes of some tensors, one after the other."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.intdigest()


def state_tensors(state: Mapping[Any, Mapping[str, Any]], parameters: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The tensors of an optimizer's state, of these parameters in this order."""
    for parameter in parameters:
        own = state.get(parameter, {})
        yield from (value for _, value in sorted(own.items()) if isinstance(value, torch.Tensor))


def digest(structure: Json, tensors: Mapping[str, torch.Tensor]) -> int:
    """64-bit digest of a state that `flatten` took apart.

    Raises:
        CorruptDataError: the structure names a tensor that is not there.
    """
    digests: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in digests:
            if name not in tensors:
                raise CorruptDataError(f"the state's structure names tensor {name!r}, which did not come with it")
            digests[name] = tensor_digest(tensors[name])
        return digests[name]

    canonical = json.dumps(_by_content(structure, of), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_64(canonical.encode()).intdigest()


def state_digest(state: object) -> int:
    """`digest` of a state as it is. Raises ConfigurationError as `flatten` does."""
    return digest(*flatten(state))


def _by_content(structure: Json, of: Callable[[str], int]) -> Json:
    """The structure with every tensor's name replaced by its digest, and unordered pairs sorted."""
    if isinstance(structure, list):
        return [_by_content(item, of) for item in structure]
    if not isinstance(structure, dict):
        return structure
    node: dict[str, Json] = {key: _by_content(item, of) for key, item in structure.items()}
    if node.get("!") in ("tensor", "ndarray"):
        node["name"] = of(structure["name"])
    if structure.get("!") in ("dict", "counter", "default"):
        node["items"] = sorted(node["items"], key=lambda pair: json.dumps(pair, sort_keys=True))
    return node


# ----------------------------------------------------------------------------------------------------------------------------- datasets
#
# Whether two ranks' datasets are the same one, as far as that is cheap to say.
#
# Every rank makes its dataset itself, and positions of one order mean nothing in another: `random_split` without a seed, for example, gives
# each rank other samples. So what can be told of a dataset without fetching a sample of it goes into a digest that ranks compare: its
# length, which samples a subset takes, and the whole numbers (labels, tokens) that a `TensorDataset` holds. Numbers with a fraction are
# left out, since machines round them otherwise; so are the samples of all other datasets, which may be slow to make, or be made in data
# workers alone.

SAMPLES: Final = "what is known of the dataset's samples"
"""In what a loader deals by: its dataset's identity."""
DRAWN: Final = "what the sampler drew"
"""In what a loader deals by: a digest of the epoch's order."""
STREAMED: Final = "what the stream gave"
"""In what a loader deals by: how many items were read of it up to the end of the step, a digest of them, and whether it ends there."""

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
