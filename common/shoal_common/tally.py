"""What a worker has committed, in a file of fixed size that its launcher reads: counts that are
exact whenever the worker dies.

The worker maps the file into its memory and writes a few numbers there at each commit, without a
system call; the kernel keeps them when the process gets SIGKILL. Each commit goes into the older
one of two slots, with a checksum, so that there is always one that is whole. A *span* is a time in
which the worker committed step after step in one generation: where one ends and the next one
begins, training may have stood still. Moments are those of `time.monotonic_ns`, which is one clock
for all processes of a machine.

What all members of a job tell the coordinator, and how often, is `shoal.v1.Progress`; this is for
the launcher on the same machine alone.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

LONG_GAP_NS: Final = 500_000_000
"""Between two commits in one generation, from which on they belong to two spans: an evaluation,
say, or a lost parameter server."""
MOST_SPANS: Final = 64
"""Finished spans that a tally holds, the newest ones."""

_MAGIC: Final = b"shoaltal"
_SPAN: Final = struct.Struct("<qqqqq")
_COUNTS: Final = struct.Struct("<qqqqqqqqdd?Qqq")
_SLOT: Final = struct.Struct(f"<q{_COUNTS.size}s{_SPAN.size}sqI")
_PUSHING_AT: Final = len(_MAGIC)
_SLOTS_AT: Final = 64
_RING_AT: Final = _SLOTS_AT + 2 * 192
_KNOWN: Final = struct.Struct("<Qqq")
_KNOWN_AT: Final = _RING_AT + MOST_SPANS * _SPAN.size
_MOST_KNOWN: Final = 256
_SIZE: Final = _KNOWN_AT + _MOST_KNOWN * _KNOWN.size


class Span(NamedTuple):
    """Commits that followed each other in one generation."""

    generation: int
    began_after: int
    """Committed steps of the run before the first one of the span."""
    steps: int
    """Committed steps of the run after the last one of the span."""
    first_ns: int
    """When the first one was committed."""
    last_ns: int
    """When the last one was."""


class Counts(NamedTuple):
    """What is counted over all spans. Samples are those of all ranks; those of this worker alone
    where `asynchronous`."""

    commits: int = 0
    """Commits of this process."""
    samples: int = 0
    """Samples of the run's committed steps; 0 where the script deals its samples itself."""
    samples_before: int = 0
    """What `samples` was before this process's first commit: a joiner and a run that is resumed
    have some."""
    steps_before: int = 0
    """Steps of the run before this process's first commit."""
    steps_in_all: int = 0
    """How many steps the run will have had at its end, as its loop over epochs tells; 0: not
    known."""
    epoch: int = 0
    lost_steps: int = 0
    """Steps that a fault made void here."""
    losses: int = 0
    """How many losses `loss_sum` is of."""
    loss_sum: float = 0.0
    """The sum of the losses told that are finite."""
    loss: float = math.nan
    """Told last; NaN: none was, or that."""
    asynchronous: bool = False
    """Each worker takes steps of its own (async_sgd): the run's steps and samples are the sum over
    the workers."""
    batch: int = 0
    """Key of the batch whose push was committed last; 0: pushes have none."""
    unpushed_steps: int = 0
    """Inner steps since the last push, among `commits`: the servers do not have them yet."""
    unpushed_samples: int = 0
    """Samples of those."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A worker's commits, at one moment."""

    counts: Counts
    spans: tuple[Span, ...]
    """The newest ones, oldest first; the last one may go on."""
    spans_before: int
    """How many there were before these."""
    in_doubt: int = 0
    """Key of a batch whose push had begun and is not among the commits: a worker that died may have
    pushed it. 0: none."""
    known: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Steps and samples, by key, of batches that the servers had from another worker already. They
    are not among the commits: if that worker committed them, it has counted them; else they are its
    `in_doubt`."""

    @property
    def steps(self) -> int:
        """Committed steps of the run; of this worker where it is asynchronous."""
        return self.spans[-1].steps

    @property
    def own_steps(self) -> int:
        """Steps of this worker that the servers have."""
        return self.steps - self.counts.steps_before - self.counts.unpushed_steps

    @property
    def own_samples(self) -> int:
        """Samples of those."""
        return self.counts.samples - self.counts.samples_before - self.counts.unpushed_samples


class TallyWriter:
    """The worker's side. Used by its training thread alone."""

    def __init__(self, path: Path, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Makes the file. Raises OSError: there is no room for it, or no such directory."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # an error here, where writing to a page that cannot be had would be a signal
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._memory[: len(_MAGIC)] = _MAGIC
        self._clock_ns = clock_ns
        self._finished = 0
        self._span: Span | None = None
        self._number = 0
        self._known = 0

    def pushing(self, batch: int) -> None:
        """A push of the batch with this key begins; 0: none is under way."""
        struct.pack_into("<Q", self._memory, _PUSHING_AT, batch)

    def known(self, batch: int, steps: int, samples: int) -> None:
        """The servers had the batch from another worker already, or the round of so many steps that
        has this key."""
        self.pushing(0)
        _KNOWN.pack_into(
            self._memory, _KNOWN_AT + self._known % _MOST_KNOWN * _KNOWN.size, batch, steps, samples
        )
        self._known += 1

    def committed(self, counts: Counts, *, generation: int, steps: int) -> None:
        """A step was committed in `generation`; the run has `steps` now."""
        now, span = self._clock_ns(), self._span
        if (
            span is not None
            and generation == span[0]
            and steps == span[2] + 1
            and now - span[4] < LONG_GAP_NS
        ):
            span = Span(generation, span[1], steps, span[3], now)
        else:
            if span is not None:
                _SPAN.pack_into(
                    self._memory, _RING_AT + self._finished % MOST_SPANS * _SPAN.size, *span
                )
                self._finished += 1
            span = Span(generation, steps - 1, steps, now, now)
        self._span = span
        self.recount(counts)

    def recount(self, counts: Counts) -> None:
        """The counts have changed since the last commit, which stands."""
        span = self._span
        if span is None:
            return
        self._number = number = self._number + 1
        body = (
            struct.pack("<q", number)
            + _COUNTS.pack(*counts)
            + _SPAN.pack(*span)
            + struct.pack("<q", self._finished)
        )
        at = _SLOTS_AT + number % 2 * 192
        self._memory[at : at + _SLOT.size] = body + struct.pack("<I", zlib.crc32(body))


def read_tally(path: Path) -> Tally | None:
    """Returns what the worker has committed by now; None: nothing yet, or there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _SIZE or not content.startswith(_MAGIC):
        return None
    newest: tuple[int, bytes, bytes, int] | None = None
    for at in (_SLOTS_AT, _SLOTS_AT + 192):
        body = content[at : at + _SLOT.size - 4]
        number, counts, span, finished, checksum = _SLOT.unpack_from(content, at)
        if number and zlib.crc32(body) == checksum and (newest is None or number > newest[0]):
            newest = number, counts, span, finished
    if newest is None:
        return None
    _, counts, span, finished = newest
    # the oldest one may be being written over
    kept = range(max(0, finished - MOST_SPANS + 1), finished)
    ring = [
        Span(*_SPAN.unpack_from(content, _RING_AT + number % MOST_SPANS * _SPAN.size))
        for number in kept
    ]
    told = Counts(*_COUNTS.unpack(counts))
    (pushing,) = struct.unpack_from("<Q", content, _PUSHING_AT)
    known = {
        key: (steps, samples)
        for key, steps, samples in _KNOWN.iter_unpack(content[_KNOWN_AT:_SIZE])
        if key
    }
    return Tally(
        counts=told,
        spans=(*ring, Span(*_SPAN.unpack(span))),
        spans_before=kept.start,
        in_doubt=pushing if pushing != told.batch else 0,
        known=known,
    )
