"""Digests of states. Equal states have equal digests in every process, regardless of the insertion
order of their dicts.

Used to determine whether two members have the same state under one name, and to detect damage in
files and transfers. Digests protect against accidents, not against an adversary: xxh3 is not a
cryptographic hash.

A digest covers types, values and the order of sequences and OrderedDicts, and the dtype, shape and
bytes of each tensor. It ignores the order of other dicts, the names and devices of tensors, and
whether equal tensors are the same object.

`identity_of` computes digests of datasets.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash
from shoal_common.errors import CorruptDataError
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from shoal_worker.state.tree import Json, flatten


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the tensor's elements as bytes, in row-major order. A contiguous CPU tensor is not
    copied: the view is writable and shares the tensor's memory. Other tensors are copied.

    NumPy is not used, because a tensor whose memory has been exposed to NumPy can no longer be
    resized. Buffers whose size is determined only later must stay resizable."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if not plain.nbytes:
        return memoryview(bytearray())
    held: Any = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
    held.tensor = plain  # keeps the memory alive as long as the view
    return memoryview(held).cast("B")


def tensor_digest(tensor: torch.Tensor) -> int:
    """Returns a 64-bit digest of a tensor's dtype, shape and bytes."""
    state = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(bytes_of(tensor))
    return state.intdigest()


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns a 64-bit digest of the bytes of several tensors, in order. Digests of device tensors
    are computed on the device, with one synchronization, and differ from digests of equal tensors
    on the host."""
    digest = xxhash.xxh3_64()
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        if _is_far(tensor):
            sums.append(mixed_sum(tensor))
        else:
            digest.update(bytes_of(tensor))
    for there in sorted({each.device for each in sums}, key=str):
        digest.update(
            np.asarray(
                torch.stack([each for each in sums if each.device == there]).tolist(), dtype="<i8"
            ).data
        )
    return digest.intdigest()


def digest_in_place(tensor: torch.Tensor) -> int:
    """Returns a 64-bit digest of a tensor's dtype, shape and bytes. As in `digest_of`, a device
    tensor is not copied to the host."""
    return xxhash.xxh3_64_intdigest(
        f"{tensor.dtype}{tuple(tensor.shape)}{digest_of([tensor])}".encode()
    )


@torch.no_grad()
def mixed_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Computes a digest of a tensor's bytes on the tensor's device, and returns it as a 64-bit
    integer tensor on that device. A change to one bit, or a swap of two elements, changes the
    digest with very high probability."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    words = (torch.view_as_real(plain).view(-1) if plain.is_complex() else plain).view(
        _WHOLE[tensor.dtype.itemsize]
    )
    # Positions within a chunk are multiplied by an odd number with many bits, so that a value
    # counts differently at each position.
    places = torch.arange(min(len(words), _CHUNK), device=words.device).mul_(_ODD[0])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        mixed = chunk.to(torch.int64, copy=True).add_(places[: len(chunk)]).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 31).mul_(_ODD[2])
        total.mul_(_ODD[1]).add_(mixed.bitwise_xor_(mixed >> 29).sum())
    return total


@torch.no_grad()
def part_digest(part: torch.Tensor, begin: int) -> int:
    """Returns the contribution of a contiguous range of elements to the digest of a tensor. The
    tensor's digest is the sum of the contributions of all its parts, modulo 2**64. The sum does not
    depend on how the tensor is divided into parts, or on their devices. `begin`: index of the first
    element.

    A change to one bit, or a swap of two elements, changes the digest with very high probability.
    """
    plain = part.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    words = (torch.view_as_real(plain).view(-1) if plain.is_complex() else plain).view(
        _WHOLE[part.dtype.itemsize]
    )
    first = begin * (len(words) // max(1, len(plain)))
    weights, at = _weights(words.device), 0
    sums: list[torch.Tensor] = []
    factors: list[int] = []
    while at < len(words):
        row, column = divmod(first + at, _ROW)
        chunk = words[at : at + _ROW - column].to(torch.int64, copy=True)
        sums.append(chunk.mul_(weights[column : column + len(chunk)]).sum())
        factors.append(pow(_ODD[1], row, 1 << 64))
        at += len(chunk)
    totals: list[int] = torch.stack(sums).tolist() if sums else []
    return sum(total * factor for total, factor in zip(totals, factors, strict=True)) % (1 << 64)


def describe_values(tensor: torch.Tensor, digest: int | None = None) -> dict[str, Any]:
    """Returns the dtype, shape and digest of a tensor, as JSON. Equal tensors have equal
    descriptions in every process and on every device. `digest`: sum of `part_digest` over the
    tensor's parts; None: it is computed from `tensor`, which must have all values."""
    total = part_digest(tensor, 0) if digest is None else digest % (1 << 64)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "digest": f"{total:016x}",
    }


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    """Returns the odd factors that `part_digest` uses for the elements of one row."""
    mixed = torch.arange(1, _ROW + 1, device=device).mul_(_ODD[0])
    mixed.bitwise_xor_(mixed >> 30).mul_(_ODD[1])
    return mixed.bitwise_xor_(mixed >> 27).mul_(_ODD[2]).bitwise_or_(1)


def _is_far(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on a device other than the CPU."""
    return tensor.device.type not in ("cpu", "meta")


_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Size of an element in bytes -> integer type for reading its bits. An element of 16 bytes is read
as two numbers."""
_CHUNK: Final = 1 << 22
"""Number of 8-byte integers that are mixed at a time."""
_ROW: Final = 1 << 18
"""Number of elements per row. `part_digest` uses the same factors in every row, times a power that
depends on the row's number."""
_ODD: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Constants of the mixing function, as signed numbers. They and its steps (multiply, shift, repeat)
are from Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
section 5."""


def state_tensors(
    state: Mapping[Any, Mapping[str, Any]], parameters: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the tensors in an optimizer's state: description for error messages -> tensor.
    `parameters`: parameter name -> its key in `state`."""
    return {
        f"{key} of {name!r}": value
        for name, parameter in parameters.items()
        for key, value in sorted(state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    }


def digest(
    structure: Json,
    tensors: Mapping[str, torch.Tensor],
    tensor_digest: Callable[[torch.Tensor], int] = tensor_digest,
) -> int:
    """Returns a 64-bit digest of a state, given as the result of `flatten`. `tensor_digest`:
    computes the digest of one tensor.

    Raises:
        CorruptDataError: the structure refers to a missing tensor.
    """
    digests: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in digests:
            if name not in tensors:
                raise CorruptDataError(
                    f"the state's structure refers to tensor {name!r}, which is missing"
                )
            digests[name] = tensor_digest(tensors[name])
        return digests[name]

    canonical = json.dumps(
        _by_content(structure, of), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return xxhash.xxh3_64(canonical.encode()).intdigest()


def state_digest(state: object) -> int:
    """Returns the `digest` of a state. Raises ConfigurationError, like `flatten`."""
    return digest(*flatten(state))


def _by_content(structure: Json, of: Callable[[str], int]) -> Json:
    """Returns the structure with each tensor's name replaced by the tensor's digest, and with
    unordered pairs sorted. `of`: returns the digest of the tensor with a given name."""
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


# ----------------------------------------------------------------------------------------- datasets

SAMPLES: Final = "the dataset's samples"
"""Key for the identity of the dataset in a loader's dealing."""
DRAWN: Final = "the sampler's indices"
"""Key for a digest of the epoch's sample order in a loader's dealing."""
STREAMED: Final = "the stream's items"
"""Key for the description of a stream in a loader's dealing: the number of items read up to the end
of the step, a digest of them, and whether the stream ends there."""

_ROWS: Final = 1 << 16
"""Maximum number of rows of a tensor, evenly spaced, that are included in a dataset's digest."""
_STORED_ROWS: Final = 8
"""Maximum number of rows of a Hugging Face dataset, evenly spaced, that are included in its digest.
Such rows may be large and are read from a file."""
_STORED_ITEMS: Final = 256
"""Maximum number of items of a list in a row of a Hugging Face dataset that are included in the
digest."""


def identity_of(dataset: Any) -> str:
    """Returns a digest of the known properties of `dataset`. Equal datasets have equal digests, but
    different datasets may have equal digests too.

    Ranks compare these digests, because each rank creates its dataset itself: without a seed, for
    example, `random_split` gives each rank different samples. The digest contains only properties
    that are available without fetching a sample: the length, the samples of a subset, the integers
    (labels, tokens) of a `TensorDataset`, and some stored rows of a Hugging Face dataset.
    Floating-point numbers are omitted, because machines round them differently. The samples of all
    other datasets are omitted too, because creating them may be slow, or possible only in data
    workers.
    """
    return xxhash.xxh3_64_hexdigest(repr(_describe(dataset)).encode())


def _describe(dataset: Any) -> object:
    if isinstance(dataset, Subset):
        return "subset", _digest_of_indices(dataset.indices), _describe(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return "concat", [_describe(part) for part in dataset.datasets]
    if type(dataset) is TensorDataset:
        return "tensors", [_describe_tensor(tensor) for tensor in dataset.tensors]
    # A project may have a module of its own that is called `datasets`.
    rows: Any = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    if rows is not None and isinstance(dataset, rows):
        return "rows", len(dataset), _digest_of_rows(dataset)
    return len(dataset)


def _digest_of_indices(indices: Sequence[int]) -> str:
    try:
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(indices, dtype=np.int64).data)
    except (TypeError, ValueError, OverflowError):
        # for example keys of a mapping, which Subset also accepts
        return str(len(indices))


def _digest_of_rows(dataset: Any) -> str:
    """Returns a digest of some rows of a Hugging Face dataset, evenly spaced, as they are stored:
    no format or transform is applied to them. Returns "" if they cannot be read."""
    if not len(dataset):
        return ""
    numbers = np.linspace(0, len(dataset) - 1, num=min(_STORED_ROWS, len(dataset)), dtype=int)
    try:
        rows = dataset.with_format("arrow")[numbers.tolist()].to_pylist()
    except Exception:  # such as a date that Python cannot represent
        return ""
    return xxhash.xxh3_64_hexdigest(repr(_without_floats(rows)).encode())


def _without_floats(value: Any) -> object:
    """Returns a value stored in a dataset, without its floating-point numbers, and without the
    folders in paths, which may differ between machines."""
    if isinstance(value, str):
        # text may contain slashes too, but paths hardly contain spaces or tags
        return value if any(each in value for each in " <\n") else value.rpartition("/")[2]
    if isinstance(value, bytes):
        return xxhash.xxh3_64_hexdigest(value)
    if isinstance(value, list):
        return len(value), [_without_floats(each) for each in value[:_STORED_ITEMS]]
    if isinstance(value, dict):
        return {name: _without_floats(each) for name, each in value.items()}
    return value if value is None or isinstance(value, int) else type(value).__name__


def _describe_tensor(tensor: torch.Tensor) -> object:
    described = str(tensor.dtype), tuple(tensor.shape)
    if (
        tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return described
    rows = tensor.detach()[:: max(1, len(tensor) // _ROWS)].cpu().contiguous()
    return *described, xxhash.xxh3_64_hexdigest(rows.view(torch.uint8).numpy().data)
