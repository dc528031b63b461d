"""Computes the bucket and the initial values of rows from their ids.

The results are bit-identical on every machine: all arithmetic is exact except one float64
multiplication, whose result is rounded to float32. The generator is counter-based: it applies
splitmix64's finalizer (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014) to the seed, the id and the element index, so that any row can be generated
independently of the others.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint64]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_TWELVE: Final = 12
"""Number of uniform random numbers whose sum approximates a normally distributed number. The sum
has variance 1 and is never more than six standard deviations from the mean."""
_MOST_AT_ONCE: Final = 1 << 18
"""Number of elements that are generated at a time, so that temporary arrays stay in the processor's
cache."""


def mixed(words: _Words) -> _Words:
    """Applies splitmix64's finalizer to 64-bit words: a permutation that maps similar words to
    uncorrelated ones."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hashed(ids: Ids) -> _Words:
    """Returns a 64-bit hash of each id."""
    return mixed(ids.view(np.uint64) + _GAMMA)


def buckets_of(ids: Ids, buckets: int) -> npt.NDArray[np.int64]:
    """Returns the index of each id's bucket."""
    return (hashed(ids) % np.uint64(buckets)).astype(np.int64)


def initial_rows(ids: Ids, dim: int, *, seed: int, initializer: str, scale: float) -> Values:
    """Returns the initial values of rows, `[len(ids), dim]`.

    "uniform": numbers of 24 random bits in [-scale, scale). "normal": the centered sum of twelve
    numbers of 16 random bits, whose variance differs from 1 by at most a billionth, times `scale`.
    "zeros": zeros.
    """
    if initializer == "zeros":
        return np.zeros((len(ids), dim), dtype=np.float32)
    made = np.empty((len(ids), dim), dtype=np.float32)
    step = max(1, _MOST_AT_ONCE // dim)
    for begin in range(0, len(ids), step):
        keys = mixed(
            hashed(ids[begin : begin + step]) ^ mixed(np.array([seed], dtype=np.uint64) + _GAMMA)
        )
        made[begin : begin + step] = (
            _uniform(keys, dim, scale) if initializer == "uniform" else _normal(keys, dim, scale)
        )
    return made


def _uniform(keys: _Words, dim: int, scale: float) -> npt.NDArray[Any]:
    bits = _drawn(keys, dim) >> np.uint64(40)
    return (bits.astype(np.float64) / 2**23 - 1.0) * scale


def _normal(keys: _Words, dim: int, scale: float) -> npt.NDArray[Any]:
    words = _drawn(keys, 3 * dim).reshape(len(keys), dim, 3)
    total = np.zeros((len(keys), dim), dtype=np.uint64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).sum(axis=2, dtype=np.uint64)
    return (total.astype(np.float64) - _TWELVE * 65535 / 2) / 65536 * scale


def _drawn(keys: _Words, count: int) -> _Words:
    """Returns `count` random words for each key, computed from the key."""
    counter = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    return mixed(keys[:, None] + counter)
