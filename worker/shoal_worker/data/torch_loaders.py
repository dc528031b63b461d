"""Converts the arguments of a torch DataLoader into the arguments of Shoal's loader."""

from __future__ import annotations

from typing import Any

from shoal_common.errors import ConfigurationError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from shoal_worker.data.streaming.stream import is_stream


def arguments_of(loader: Any, what: str) -> dict[str, Any]:
    """Returns the arguments of Shoal's loader for the same dataset, order and batches. The batch
    size is the DataLoader's, for a script on one process.

    Args:
        loader: a torch DataLoader.
        what: name of the DataLoader in errors.

    Raises:
        ConfigurationError: `loader` is not a DataLoader, or has batches, an order or data workers
            that Shoal does not support.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{what}: got {type(loader).__name__}; expected a torch.utils.data.DataLoader"
        )
    if loader.worker_init_fn is not None and loader.num_workers > 0:
        raise ConfigurationError(
            f"{what}: the DataLoader has a worker_init_fn, but Shoal's data workers do not call "
            "it. Shoal seeds random generators for each batch; open files and connections in the "
            "dataset, when it is first read, and leave worker_init_fn out"
        )
    return {
        "dataset": loader.dataset,
        "global_batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        **order_of(loader, what),
        **fetching_of(loader),
    }


def order_of(loader: DataLoader[Any], what: str) -> dict[str, Any]:
    """Returns the arguments for the order of the loader's sampler.

    Raises:
        ConfigurationError: the dataset creates batches itself, or the sampler deals samples to
            ranks.
    """
    if loader.batch_size is None or (
        not is_stream(loader.dataset) and type(loader.batch_sampler) is not BatchSampler
    ):
        raise ConfigurationError(
            f"{what}: the DataLoader forms its own batches (a batch_sampler, or batch_size=None), "
            "but Shoal forms batches from single samples; pass batch_size=, and a sampler that "
            "draws single samples"
        )
    if is_stream(loader.dataset):
        return {}
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            f"{what}: a {type(sampler).__name__} deals samples to a fixed number of ranks, but "
            "Shoal deals them to the current ranks; leave the sampler out, and use shuffle=True "
            "for a new order in each epoch"
        )
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def fetching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the arguments that control how batches are made from samples."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
