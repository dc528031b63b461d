"""Checks a loader's arguments before anything is made of them: each mistake gets one error that names the value and the remedy."""

from __future__ import annotations

from typing import Any

from shoal_common.errors import ConfigurationError
from torch.utils.data import Dataset, IterableDataset


def check_dataset(dataset: Any) -> None:
    """Raises ConfigurationError unless the dataset can be sharded by position: a length, and samples by index."""
    kind = type(dataset)
    # torch's base class has a __getitem__ that only raises.
    getitem = getattr(kind, "__getitem__", None)
    indexable = getitem is not None and getitem is not Dataset.__getitem__
    if not indexable or not hasattr(kind, "__len__"):
        missing = " and ".join(name for name, there in (("__getitem__", indexable), ("__len__", hasattr(kind, "__len__"))) if not there)
        what = "an iterable dataset" if isinstance(dataset, IterableDataset) else "a dataset"
        raise ConfigurationError(
            f"dataset={kind.__qualname__} is {what} without {missing}, so its samples cannot be dealt by position: of a stream nobody "
            "could say which samples a dead rank had. Give it __len__ and __getitem__(index)"
        )
    if len(dataset) == 0:
        raise ConfigurationError(f"dataset={kind.__qualname__} is empty; expected at least one sample")


def check_sizes(global_batch_size: int | None, micro_batch_size: int | None, batch_size: int | None, *, train: bool) -> None:
    """Raises ConfigurationError unless the sizes name exactly one form of the loader."""
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size, "batch_size": batch_size}
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigurationError(f"{name}={size!r}: expected a whole number of at least 1")
    if (global_batch_size is None) == (batch_size is None):
        given = "both" if batch_size is not None else "neither"
        raise ConfigurationError(
            "exactly one of global_batch_size (synchronous: samples in a step over all ranks) and batch_size (async_sgd: samples in a "
            f"batch of one rank) is needed; {given} was given"
        )
    if batch_size is not None and micro_batch_size is not None and train:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size} with batch_size={batch_size}: leased batches are not cut further; "
            "leave micro_batch_size out, or use global_batch_size"
        )


def check_rest(*, seed: int, num_workers: int, name: str | None, drop_last: bool, train: bool) -> None:
    """Raises ConfigurationError for the arguments that stand by themselves."""
    if type(seed) is not int:
        raise ConfigurationError(f"seed={seed!r}: expected a whole number, the same on every rank")
    if type(num_workers) is not int or num_workers < 0:
        raise ConfigurationError(f"num_workers={num_workers!r}: expected a whole number of at least 0")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"name={name!r}: expected a text that is not empty, or None")
    if drop_last and not train:
        raise ConfigurationError("drop_last=True with train=False: an evaluation takes every sample once; leave drop_last out")
