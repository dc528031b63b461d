"""Converts the arguments of a torch DataLoader into the arguments of Shoal's loader.

Arguments that only affect how torch's data workers operate (`prefetch_factor`,
`persistent_workers`, `in_order`, `timeout`, `pin_memory_device`) have no counterpart in Shoal's
loader. The table in docs/guides/data-sources.md shows how each argument is converted.
"""

from __future__ import annotations

import multiprocessing
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from shoal_worker.data.streaming.stream import is_stream

_STATEFUL: Final = "torchdata.stateful_dataloader"
"""Package whose DataLoader and samplers behave like torch's but can also save their position, which
Shoal's loader does itself."""


def arguments_of(loader: Any, what: str) -> dict[str, Any]:
    """Returns arguments for Shoal's loader that give the same dataset, order and batches. The
    global batch size is the DataLoader's batch size.

    Args:
        loader: a torch DataLoader.
        what: name of the DataLoader in error messages.

    Raises:
        ConfigurationError: `loader` is not a DataLoader, or has batches, an order or data workers
            that Shoal does not support.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{what}: got {type(loader).__name__}; expected a torch.utils.data.DataLoader"
        )
    _check_iteration(loader, what)
    _check_data_workers(loader, what)
    order = order_of(loader, what)
    batches: Any = loader.batch_sampler
    # the kept sampler has its own generator, which Shoal seeds again in each epoch
    seed = seed_of(loader, batches.sampler) if "shuffle" in order else {}
    return {
        "dataset": loader.dataset,
        "global_batch_size": batches.batch_size,
        "drop_last": batches.drop_last,
        **order,
        **seed,
        **fetching_of(loader),
    }


def order_of(loader: DataLoader[Any], what: str) -> dict[str, Any]:
    """Returns the arguments with which Shoal's loader uses the order of the DataLoader's sampler.

    Raises:
        ConfigurationError: the batches are formed by the dataset or by an unsupported batch
            sampler, or the sampler deals samples to ranks.
    """
    streams = is_stream(loader.dataset)
    batches: Any = loader.batch_sampler
    if streams or isinstance(loader.dataset, IterableDataset):
        forms_batches = loader.batch_size is None
    else:
        forms_batches = not _is_one_of(type(batches), BatchSampler)
    if forms_batches:
        how = (
            "batch_size=None" if batches is None else f"the batch_sampler {type(batches).__name__}"
        )
        raise ConfigurationError(
            f"{what}: the DataLoader forms its own batches ({how}), but Shoal deals single samples "
            "to the ranks, as many as are present; pass batch_size=, and a dataset and a sampler "
            "of single samples"
        )
    if streams:
        return {}
    sampler = batches.sampler
    if isinstance(sampler, DistributedSampler) or getattr(sampler, "num_replicas", 1) != 1:
        raise ConfigurationError(
            f"{what}: a {type(sampler).__name__} deals samples to a fixed number of ranks, but "
            "Shoal deals them to the current ranks; leave the sampler out, and use shuffle=True "
            "for a new order in each epoch"
        )
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if (
        _is_one_of(type(sampler), RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def seed_of(loader: DataLoader[Any], sampler: Any) -> dict[str, int]:
    """Returns {"seed": ...}, taken from the random generator that the script passed to the
    DataLoader or its sampler; an empty dict if it passed none."""
    generators = [loader.generator]
    if not type(sampler).__module__.startswith(_STATEFUL):
        # if the script passes none, torchdata's sampler creates one, with a different seed on each
        # rank
        generators.append(getattr(sampler, "generator", None))
    for generator in generators:
        if isinstance(generator, torch.Generator):
            return {"seed": generator.initial_seed()}
    return {}


def fetching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the arguments that control how Shoal's loader creates batches from samples."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }


def _check_iteration(loader: DataLoader[Any], what: str) -> None:
    """Raises ConfigurationError if the DataLoader's class overrides torch's iteration, or if its
    iteration would begin at a saved position."""
    definer = next(kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    if definer is not DataLoader and not definer.__module__.startswith(_STATEFUL):
        raise ConfigurationError(
            f"{what}: {type(loader).__name__} has an __iter__ of its own, which Shoal would not "
            "call, so its batches might differ; pass a torch.utils.data.DataLoader of the same "
            "dataset, with samples for all ranks"
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise ConfigurationError(
            f"{what}: a position was loaded into the {type(loader).__name__}, but Shoal's order "
            "differs from torch's, so samples would be lost or seen twice. Leave load_state_dict "
            "out, and call shoal.save_checkpoint and shoal.resume, which keep the loader's position"
        )


def _check_data_workers(loader: DataLoader[Any], what: str) -> None:
    """Raises ConfigurationError if Shoal's data workers would behave differently from the data
    workers of the DataLoader."""
    if not loader.num_workers:
        return  # torch ignores these arguments as well
    if loader.worker_init_fn is not None:
        raise ConfigurationError(
            f"{what}: the DataLoader has a worker_init_fn, but Shoal's data workers do not call "
            "it. Shoal seeds random generators for each batch; open files and connections in the "
            "dataset, when it is first read, and leave worker_init_fn out"
        )
    context = loader.multiprocessing_context
    ours = (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
    if context is not None and (theirs := context.get_start_method()) != ours:
        raise ConfigurationError(
            f"{what}: multiprocessing_context={theirs!r}, but Shoal's data workers use the "
            f"process's start method, {ours!r}; call multiprocessing.set_start_method({theirs!r}) "
            "at the beginning of the script, or leave multiprocessing_context out"
        )


def _is_one_of(kind: type, torchs: type) -> bool:
    """Returns whether `kind` is torch's class, or torchdata's class of the same name, but not a
    subclass."""
    return kind is torchs or (
        kind.__module__.startswith(_STATEFUL) and kind.__name__ == torchs.__name__
    )
