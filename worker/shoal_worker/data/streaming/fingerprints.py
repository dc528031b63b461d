"""Fingerprints of a stream's items. They show whether the stream yields the same items when it is
iterated again, or on a different rank.

A fingerprint covers an item's structure, strings, bytes, integers and booleans, and the dtype,
shape and integers of tensors and arrays. It covers only the head and the length of long values.
Floating-point numbers are excluded, because machines round them differently. Mapping entries whose
names begin with two underscores are excluded as well, except `__key__`: for example, webdataset's
`__url__` contains the shard's path, which may differ between machines. Objects of other types
contribute only their type.

`Probe` determines whether an item's floating-point numbers are nearly the same on all ranks.

A fingerprint has 48 bits. One rank can therefore send it, without rounding, in a float64 all-reduce
to which all other ranks contribute 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash

_BITS: Final = 48
_HEAD: Final = 4096
"""Maximum number of bytes of a string or array, and of items of a container, that a fingerprint
covers."""
_DEEPEST: Final = 16


def fingerprint(item: Any) -> int:
    """Returns a 48-bit fingerprint, which is the same for equal items."""
    state = xxhash.xxh3_64()
    _add(state, item, 0)
    return state.intdigest() >> (64 - _BITS)


def chained(before: int, after: int) -> int:
    """Returns the fingerprint of a sequence. `before`: fingerprint of the sequence without its last
    item. `after`: fingerprint of the last item. An empty sequence has the fingerprint 0."""
    return xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + after.to_bytes(8, "little")) >> (
        64 - _BITS
    )


def _add(state: Any, value: Any, depth: int) -> None:
    match value:
        case None | bool() | int():
            state.update(f"{type(value).__name__} {value};".encode())
        case str():
            state.update(
                f"str {len(value)};".encode() + value[:_HEAD].encode(errors="backslashreplace")
            )
        case bytes() | bytearray() | memoryview():
            state.update(f"bytes {len(value)};".encode())
            state.update(bytes(value[:_HEAD]))
        case torch.Tensor():
            _add_tensor(state, value)
        case np.ndarray() | np.generic():
            _add_array(state, np.asarray(value))
        case _ if depth == _DEEPEST:
            state.update(b"deep;")
        case Mapping():
            state.update(f"mapping {len(value)};".encode())
            for key in list(value)[:_HEAD]:
                if not (isinstance(key, str) and key.startswith("__") and key != "__key__"):
                    _add(state, key, depth + 1)
                    _add(state, value[key], depth + 1)
        case list() | tuple():
            state.update(f"sequence {len(value)};".encode())
            for each in value[:_HEAD]:
                _add(state, each, depth + 1)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _add(
                state,
                {field.name: getattr(value, field.name) for field in dataclasses.fields(value)},
                depth + 1,
            )
        case _:
            state.update(f"{type(value).__qualname__};".encode())


def _add_tensor(state: Any, tensor: torch.Tensor) -> None:
    state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    plain = (
        tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    )
    if plain and not tensor.is_floating_point() and not tensor.is_complex():
        _add_array(state, tensor.detach().reshape(-1)[:_HEAD].numpy())


def _add_array(state: Any, array: np.ndarray[Any, Any]) -> None:
    state.update(f"{array.dtype} {array.shape};".encode())
    if array.dtype.kind in "biuSU":
        state.update(np.ascontiguousarray(array.reshape(-1)[:_HEAD]).tobytes())


# --------------------------------------------------------------------------- floating-point numbers

_SIGNS: Final = np.random.default_rng(0).choice([-1.0, 1.0], size=(3, _HEAD))
_NEARLY: Final = 0.01
"""Maximum relative difference between the ranks' numbers for the same item. Far larger than
rounding errors, and far smaller than differences between items."""


class Probe:
    """Statistics of one item's floating-point numbers. They are summed across ranks to find out
    whether the numbers are nearly the same on all of them."""

    @staticmethod
    def of(item: Any) -> list[float]:
        """Returns this rank's contribution to the sum across ranks: the number 1, several sums of
        the item's numbers with random signs, the norm of the numbers, and the squares of these
        values."""
        values = np.zeros(0)
        for each in _fractions(item, 0):
            values = np.concatenate(
                [values, np.nan_to_num(each[: _HEAD - len(values)], posinf=0.0, neginf=0.0)]
            )
        sketch = [*(_SIGNS[:, : len(values)] @ values).tolist(), float(np.linalg.norm(values))]
        return [1.0, *sketch, *(each * each for each in sketch)]

    @staticmethod
    def alike(summed: Sequence[float]) -> bool:
        """Returns whether all ranks that contributed to `summed` have nearly the same numbers."""
        ranks, *sums = summed
        means = [each / ranks for each in sums]
        half = len(means) // 2
        size = means[half - 1]
        spreads = (
            math.sqrt(max(0.0, square - mean * mean))
            for mean, square in zip(means[:half], means[half:], strict=True)
        )
        return all(spread <= _NEARLY * size for spread in spreads)


def _fractions(value: Any, depth: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the floating-point numbers in an item, in order."""
    match value:
        case float():
            yield np.array([value])
        case torch.Tensor():
            if (
                value.is_floating_point()
                and value.layout is torch.strided
                and value.device.type == "cpu"
            ):
                yield value.detach().reshape(-1)[:_HEAD].double().numpy()
        case np.ndarray() | np.generic():
            if np.asarray(value).dtype.kind == "f":
                yield np.asarray(value).reshape(-1)[:_HEAD].astype(np.float64)
        case _ if depth == _DEEPEST:
            return
        case Mapping() | list() | tuple():
            for each in _members(value):
                yield from _fractions(each, depth + 1)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _fractions(getattr(value, field.name), depth + 1)


def _members(value: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
    """Returns the members of a collection that are part of its fingerprint."""
    if not isinstance(value, Mapping):
        return list(value[:_HEAD])
    return [
        value[key]
        for key in list(value)[:_HEAD]
        if not (isinstance(key, str) and key.startswith("__") and key != "__key__")
    ]


def distinguishes(value: Any, depth: int = 0) -> bool:
    """Returns whether the item contains strings, bytes or integers, so that its fingerprint differs
    from the fingerprints of other items."""
    match value:
        case str() | bytes() | bool() | int():
            return True
        case torch.Tensor():
            return (
                value.layout is torch.strided
                and not value.is_floating_point()
                and not value.is_complex()
                and value.numel() > 0
            )
        case np.ndarray() | np.generic():
            return np.asarray(value).dtype.kind in "biuSU" and np.asarray(value).size > 0
        case _ if depth == _DEEPEST:
            return False
        case Mapping() | list() | tuple():
            return any(distinguishes(each, depth + 1) for each in _members(value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return any(
                distinguishes(getattr(value, field.name), depth + 1)
                for field in dataclasses.fields(value)
            )
    return False
