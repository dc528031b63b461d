"""Reads one source in order from any committed position. A source is a stream, or one shard of a
`ShardedStream`.

Items are kept until the caller drops them, so that an aborted step can be repeated without reading
them again. A reader that starts in the middle of a source seeks to its position if the source (or
its iterator) has `state_dict` and `load_state_dict`, and its state at that position was saved.
Otherwise the reader iterates from the beginning of the source and skips earlier items. Fingerprints
are used to verify both ways. If a seek leads to the wrong item, the reader skips items instead. If
a source yields different items than before, the reader raises an error, because samples would be
lost or seen twice.

The random generators of torch, NumPy and Python are seeded before each item by its position. The
random numbers drawn by a source therefore do not depend on how the reader reached the position.

This module knows nothing about ranks and steps. May be used by only one thread."""

from __future__ import annotations

import abc
import base64
import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from typing_extensions import override

from shoal_worker.data.fetch import seed
from shoal_worker.data.streaming.fingerprints import chained, fingerprint
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import flatten, unflatten

_log = logging.getLogger(__name__)

_END: Final = -1
_UNCHANGING: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Types of immutable values."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Position in a source, with the data needed to return to it and to verify it."""

    position: int = 0
    """Number of items before the position."""
    fingerprint: int = 0
    """Fingerprint of the items before the position."""
    following: int | None = None
    """Fingerprint of the item at the position; -1: the source ends there; None: unknown."""
    state: str | None = None
    """The source's own state at the position; None if it has no state, or its state cannot be
    saved."""


class Reader(abc.ABC):
    """Reads a source in order from a mark, in this process or in a data worker. Keeps the items
    until they are dropped."""

    def __init__(self, at: Mark) -> None:
        self.first = at.position
        """Position of the first available item."""
        self.end: int | None = None
        """Number of items in the source, once it is known."""
        self._before = at.fingerprint
        """Fingerprint of all items before `first`."""
        self._prints: deque[int] = deque()
        """Fingerprints of the available items, beginning at `first`."""
        self._states: dict[int, str | None] = {}

    @property
    def stop(self) -> int:
        """Position after the last available item."""
        return self.first + len(self._prints)

    @abc.abstractmethod
    def items(self, positions: Iterable[int]) -> list[Any]:
        """Returns copies of the items at `positions`, which must be available. In-place changes to
        the copies do not affect a repetition of the step."""

    def expect(self, upto: int, *, states_at: Container[int] = ()) -> None:  # noqa: B027
        # a reader in this process reads in `fill`
        """Announces the arguments of the next `fill`, so that a data worker can start reading. Does
        nothing if this process reads the source."""

    @abc.abstractmethod
    def fill(self, upto: int, *, states_at: Container[int] = ()) -> None:
        """Reads until all items before `upto` are available, or the source ends. `states_at`:
        positions at which the source's state must be kept, for `mark` and `state_at`.

        Raises the source's errors. The reader cannot be used after an error.
        """

    def holds(self, mark: Mark) -> bool:
        """Returns whether this reader can continue from `mark`: the available items begin at or
        before it, and their fingerprint matches the fingerprint in the mark."""
        return (
            self.first <= mark.position <= self.stop
            and self.mark(mark.position).fingerprint == mark.fingerprint
        )

    def state_at(self, position: int) -> str | None:
        """Returns the source's state at `position`; None if the source has no state. An earlier
        `fill` must have had `position` in its `states_at`."""
        return self._states.get(position)

    def mark(self, position: int) -> Mark:
        """Returns the mark at `position`, which must be between `first` and `stop`."""
        before = self._before
        for each in itertools.islice(self._prints, position - self.first):
            before = chained(before, each)
        following = (
            self._prints[position - self.first]
            if position < self.stop
            else _END
            if position == self.end
            else None
        )
        return Mark(
            position=position,
            fingerprint=before,
            following=following,
            state=self._states.get(position),
        )

    def drop(self, position: int) -> None:
        """Drops the items before `position`."""
        while self.first < position:
            self._before = chained(self._before, self._prints.popleft())
            self.first += 1
        self._states = {at: state for at, state in self._states.items() if at >= position}

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the iteration over the source, so that a generator can close its files."""


class SourceReader(Reader):
    """Reader that reads the source in this process."""

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        *,
        key: Sequence[int],
        name: str,
        at: Mark | None = None,
    ) -> None:
        """Opens a source.

        Args:
            make: creates the source; called each time an iteration begins.
            key: key from which the random numbers are seeded.
            name: name of the source in error messages.
            at: starting position; None: the beginning.

        Raises:
            PreconditionError (STREAM_NOT_REPEATED): the source yielded different items before `at`
                than it did originally.
        """
        at = at or Mark()
        super().__init__(at)
        self._make = make
        self._key = tuple(key)
        self._name = name
        self._items: deque[Any] = deque()
        self._expected = at.following
        """Expected fingerprint of the item at `stop`; None if it is not known."""
        self._source, self._iterator = self._open(at)

    @override
    def items(self, positions: Iterable[int]) -> list[Any]:
        return [_copied(self._items[position - self.first]) for position in positions]

    def raw_items(self, positions: Iterable[int]) -> list[Any]:
        """Returns the items themselves instead of copies, for a caller that copies them anyway."""
        return [self._items[position - self.first] for position in positions]

    @override
    def fill(self, upto: int, *, states_at: Container[int] = ()) -> None:
        while self.end is None and self.stop < upto:
            if self.stop in states_at and self.stop not in self._states:
                self._states[self.stop] = self._state()
            self._pull()

    def news(self, known: int, upto: int) -> tuple[list[int], dict[int, str | None], int | None]:
        """Returns what a reader in another process, which already has the items before `known`,
        needs to know after `fill(upto)`: the new fingerprints and states, and the length of the
        source if it has ended."""
        stop = min(self.stop, max(known, upto))
        prints = list(itertools.islice(self._prints, known - self.first, stop - self.first))
        states = {at: state for at, state in self._states.items() if known <= at <= stop}
        return prints, states, self.end if self.end is not None and self.end < upto else None

    @override
    def drop(self, position: int) -> None:
        for _ in range(position - self.first):
            self._items.popleft()
        super().drop(position)

    @override
    def close(self) -> None:
        _close(self._iterator)
        self._prints.clear()
        self._items.clear()

    # -------------------------------------------------------------------------------------- opening

    def _open(self, at: Mark) -> tuple[Any, Iterator[Any]]:
        if at.position and at.state is not None:
            sought = self._seek(at, at.state)
            if sought is not None:
                return sought
            _log.warning(
                "%s: loading the state_dict saved at position %d led to a different item than "
                "before (it may lack the contents of a shuffle buffer). The stream is read from "
                "the beginning instead, and earlier items are skipped",
                self._name,
                at.position,
            )
        source = self._make()
        iterator = iter(source)
        passed = 0
        for position in range(at.position):
            seed((*self._key, position))
            try:
                passed = chained(passed, fingerprint(next(iterator)))
            except StopIteration:
                raise self._not_repeated(
                    f"it ended after {position} items, but had at least {at.position} before"
                ) from None
        if passed != at.fingerprint:
            raise self._not_repeated(
                f"its first {at.position} items differ from those already trained on"
            )
        return source, iterator

    def _seek(self, at: Mark, state: str) -> tuple[Any, Iterator[Any]] | None:
        """Seeks to `at` with the source's own state. Returns None if the seek led to a different
        item."""
        decoded = _decode(state)
        source = self._make()
        if decoded["of"] == "source":
            # on a copy, because changes that load_state_dict makes to an object may affect its
            # later iterations
            source = _copy(source)
            source.load_state_dict(decoded["state"])
        iterator: Any = iter(source)
        if decoded["of"] != "source":
            iterator.load_state_dict(decoded["state"])
        if at.following is None:
            return source, iterator
        seed((*self._key, at.position))
        try:
            item = next(iterator)
        except StopIteration:
            self.end = at.position if at.following == _END else None
            return (source, iterator) if at.following == _END else None
        found = fingerprint(item)
        if found != at.following:
            _close(iterator)
            return None
        self._states[at.position] = state
        self._hold(found, item)
        self._expected = None
        return source, iterator

    def _pull(self) -> None:
        """Reads the next item."""
        at, expected = self.stop, self._expected
        seed((*self._key, at))
        try:
            item = next(self._iterator)
        except StopIteration:
            if expected not in (None, _END):
                raise self._not_repeated(
                    f"it ended after {at} items, but had more before"
                ) from None
            self.end = at
            return
        found = fingerprint(item)
        if expected not in (None, found):
            raise self._not_repeated(f"item {at} (counting from 0) differs from before")
        self._expected = None
        self._hold(found, item)

    def _hold(self, found: int, item: Any) -> None:
        self._prints.append(found)
        self._items.append(item)

    def _state(self) -> str | None:
        candidates: tuple[tuple[str, Any], ...] = (
            ("iterator", self._iterator),
            ("source", self._source),
        )
        for kind, what in candidates:
            if callable(getattr(what, "state_dict", None)) and callable(
                getattr(what, "load_state_dict", None)
            ):
                try:
                    return _encode({"of": kind, "state": what.state_dict()})
                except ConfigurationError as error:
                    _log.warning(
                        "%s: its state_dict cannot be saved, so after a restart earlier items "
                        "will be skipped one by one: %s",
                        self._name,
                        error,
                    )
                    return None
        return None

    def _not_repeated(self, what: str) -> PreconditionError:
        return PreconditionError(
            f"{self._name} did not repeat itself: {what}. Continuing would lose samples or use "
            "some twice. It must yield the same items in the same order each time it is iterated "
            "in an epoch: seed its shuffling in set_epoch(epoch) and read from data that does "
            "not change, or implement state_dict and load_state_dict",
            reason="STREAM_NOT_REPEATED",
        )


def _close(iterator: Iterator[Any]) -> None:
    """Closes the iterator if it has a `close` method, so that a generator can close its files."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


def _copied(item: Any) -> Any:
    """Returns a copy of an item. Fast for types that are common in streams: strings, numbers,
    tensors and arrays, in lists, tuples and dictionaries."""
    kind = type(item)
    if kind in _UNCHANGING:
        return item
    if kind is torch.Tensor and not item.requires_grad:
        return item.clone()
    if kind in (list, tuple):
        return kind(item if all(type(each) in _UNCHANGING for each in item) else map(_copied, item))
    if kind is dict:
        return {key: _copied(value) for key, value in item.items()}
    return _copy(item)


def _copy(source: Any) -> Any:
    """Returns a deep copy of a source if possible, otherwise a shallow one: a source that contains
    an open file or a lock cannot be copied deeply."""
    try:
        return copy.deepcopy(source)
    except Exception:  # parts of the source may raise any error
        return copy.copy(source)


def _encode(state: Any) -> str:
    structure, tensors = flatten(state)
    return base64.b64encode(dump_tensors(tensors, {"structure": structure})).decode()


def _decode(state: str) -> Any:
    tensors, metadata = load_tensors(base64.b64decode(state))
    return unflatten(metadata["structure"], tensors)
