"""Digests of states: equal states have equal digests in every process, whatever order their dicts were filled in.

Used to tell whether two members hold the same state under one name, and to find damage in files and transfers. It protects against
accidents, not against an adversary: xxh3 is no cryptographic hash.

What counts: types, values and the order of sequences and OrderedDicts, and of each tensor its dtype, shape and bytes. What does not: the
order of other dicts, the names tensors have, where they lie, and whether equal tensors are one object or two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
import xxhash
from shoal_common.errors import CorruptDataError

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
