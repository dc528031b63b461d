"""The streams that a loader can read: an iterable whose samples cannot be accessed by index, or a
list of shards (`ShardedStream`). Also refuses loader arguments that do not apply to streams."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import xxhash
from shoal_common.errors import ConfigurationError
from torch.utils.data import Dataset, IterableDataset


class ShardedStream(IterableDataset[Any]):
    """A stream that consists of shards, such as .tar files. An elastic job reads each shard once
    per epoch. Use it for data that would be too expensive for every rank to read completely.

    An `ElasticDataLoader` with `micro_batch_size=` deals entire shards: each shard is read by one
    data-parallel rank at a time, and several shards are read in parallel. If the rank that reads a
    shard dies, another rank continues after the last item that a committed step has trained on. The
    items of a step depend on the shards and the batch sizes, not on the number of ranks or data
    workers. `shuffle=True` shuffles the order of the shards each epoch. In a loader with
    `train=False`, each shard is evaluated by one rank if there are at least as many shards as
    ranks; otherwise, several ranks share a shard.

    Iterating over the stream directly yields the items of all shards in order.
    """

    def __init__(self, shards: Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        """Args:
            shards: arguments for `read`, such as paths; the same on every rank, in the same order.
            read: function that returns a shard's items. It must return the same items in the same
                order in every call, on any rank. It may draw random numbers from the global
                generators of torch, NumPy and Python, which are seeded. If its result (or the
                result's iterator) has `state_dict` and `load_state_dict`, a rank that continues
                reading a shard in the middle uses them to seek to its position; otherwise, it skips
                items.

        Raises:
            ConfigurationError: there is no shard, or `shards` has no length.
        """
        if not isinstance(shards, Sequence) or isinstance(shards, (str, bytes)) or not len(shards):
            raise ConfigurationError(
                f"ShardedStream(shards={shards!r}): expected a list of at least one shard, such as "
                "sorted paths"
            )
        if not callable(read):
            raise ConfigurationError(
                f"ShardedStream(read={read!r}): expected a function that takes a shard and yields "
                "its items"
            )
        self.shards = list(shards)
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the items of all shards."""
        for shard in self.shards:
            yield from self.read(shard)


def is_stream(dataset: Any) -> bool:
    """Returns whether `dataset` is a stream: it is iterable, but its samples cannot be accessed by
    index."""
    kind = type(dataset)
    return hasattr(kind, "__iter__") and not is_indexable(dataset)


def is_indexable(dataset: Any) -> bool:
    """Returns whether `dataset` has a length and samples that can be accessed by index."""
    return hasattr(type(dataset), "__len__") and has_items(dataset)


def has_items(dataset: Any) -> bool:
    """Returns whether the dataset's samples can be accessed by index. The __getitem__ of torch's
    base class is disregarded, because it only raises an error."""
    getitem = getattr(type(dataset), "__getitem__", None)
    return getitem is not None and getitem is not Dataset.__getitem__


def makes_of(stream: Any) -> list[Callable[[], Iterable[Any]]]:
    """Returns functions that create the sources of a stream: one per shard, or one for the stream
    itself."""
    if isinstance(stream, ShardedStream):
        return [functools.partial(stream.read, shard) for shard in stream.shards]
    return [functools.partial(_itself, stream)]


def names_of(stream: Any) -> list[str]:
    """Returns the names of a stream's sources for error messages."""
    if isinstance(stream, ShardedStream):
        return [f"shard {shard!r}" for shard in stream.shards]
    return [f"the stream {type(stream).__qualname__}"]


def _itself(stream: Any) -> Any:
    return stream


def identity_of_stream(stream: Any) -> str:
    """Returns a digest of a stream's properties that are known without reading it: the number and
    the names of its shards. For paths, only the file names are used, not the folders."""
    if not isinstance(stream, ShardedStream):
        return "a stream"
    names = [
        PurePath(each).name if isinstance(each, (str, os.PathLike)) else type(each).__qualname__
        for each in stream.shards
    ]
    return f"{len(names)} shards {xxhash.xxh3_64_hexdigest(repr(names).encode())}"


def check_stream(
    stream: Any,
    *,
    batch_size: int | None,
    micro_batch_size: int | None,
    shuffle: bool | None,
    sampler: object,
    num_workers: int,
    train: bool,
) -> None:
    """Raises ConfigurationError for loader arguments that are meaningless or unsupported for a
    stream."""
    what = f"dataset={type(stream).__qualname__} is a stream"
    if hasattr(type(stream), "__next__"):
        raise ConfigurationError(
            f"{what} that can be iterated only once, but it must be iterated again after a fault "
            "and on a rank that joins; pass an object whose __iter__ starts over, such as an "
            "IterableDataset"
        )
    if sampler is not None:
        raise ConfigurationError(
            f"{what}, but sampler= draws indices, which a stream does not have; leave sampler out"
        )
    if batch_size is not None and train:
        raise ConfigurationError(
            f"{what}, but batch_size= leases batches by number (async_sgd), and a stream has no "
            "known number of batches and would have to be read again from the beginning for a "
            "batch that is dealt again. Use a strategy with global_batch_size=, or a dataset "
            "with __len__ and __getitem__(index)"
        )
    if shuffle and not isinstance(stream, ShardedStream):
        raise ConfigurationError(
            f"shuffle=True, but {what}, which has its own order; leave shuffle out, and shuffle "
            "in the stream, in its set_epoch(epoch)"
        )
    if num_workers > 1 and not isinstance(stream, ShardedStream):
        raise ConfigurationError(
            f"num_workers={num_workers}, but {what}, which is read in one order by one process; "
            "with num_workers=1 it reads ahead while the rank trains. If reading is still too "
            "slow, divide the stream into shards (shoal.ShardedStream), which several ranks read "
            "in parallel, each with several data workers"
        )
    if isinstance(stream, ShardedStream) and micro_batch_size is None and train:
        raise ConfigurationError(
            f"{what} whose shards are dealt to ranks by micro-batches; pass micro_batch_size= to "
            "the loader, and loop over loader.steps()"
        )
