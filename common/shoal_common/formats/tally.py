"""A worker's counts of committed work, in a file of fixed size that its launcher reads. The counts
are exact even if the worker is killed.

The worker maps the file into its memory and writes a few numbers at each commit, without a system
call. They survive a SIGKILL, because the kernel owns the mapped pages. The file has two slots with
checksums. Each commit overwrites the older slot, so that one slot is always complete. A *span* is a
period of consecutive commits in one generation; training may have paused between two spans. Times
are from `time.monotonic_ns`, a clock that all processes of a machine share.

The coordinator gets progress reports separately (`shoal.v1.Progress`); this file is only for the
launcher on the same machine.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

LONG_GAP_NS: Final = 500_000_000
"""Minimum time in nanoseconds between two commits of one generation that ends a span, e.g. because
of an evaluation or a lost parameter server."""
MOST_SPANS: Final = 64
"""Maximum number of finished spans in a tally; the newest are kept."""

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
MOST_METRICS: Final = 16
"""Maximum number of reported metrics in a tally, in addition to the loss."""
_METRIC: Final = struct.Struct("<256sd")
_METRICS_AT: Final = _KNOWN_AT + _MOST_KNOWN * _KNOWN.size
_STRATEGY_AT: Final = _METRICS_AT + MOST_METRICS * _METRIC.size
_STRATEGY_BYTES: Final = 32
_SIZE: Final = _STRATEGY_AT + _STRATEGY_BYTES


class Span(NamedTuple):
    """A period of consecutive commits in one generation."""

    generation: int
    began_after: int
    """Number of committed steps of the run before the span's first commit."""
    steps: int
    """Number of committed steps of the run after the span's last commit."""
    first_ns: int
    """Time of the first commit."""
    last_ns: int
    """Time of the last commit."""


class Counts(NamedTuple):
    """Totals over all spans. Samples are counted over all ranks or, if `asynchronous`, for this
    worker only."""

    commits: int = 0
    """Number of commits of this process."""
    samples: int = 0
    """Number of samples in the run's committed steps; 0 if the script distributes its samples
    itself."""
    samples_before: int = 0
    """Value of `samples` before this process's first commit; above 0 in a joiner and in a resumed
    run."""
    steps_before: int = 0
    """Number of steps of the run before this process's first commit."""
    steps_in_all: int = 0
    """Total number of steps of the run, as computed from its loop over epochs; 0 if unknown."""
    epoch: int = 0
    lost_steps: int = 0
    """Number of steps that were aborted in this process because of a fault."""
    losses: int = 0
    """Number of losses in `loss_sum`."""
    loss_sum: float = 0.0
    """Sum of the finite losses that were reported."""
    loss: float = math.nan
    """Last reported loss; NaN if there is none."""
    asynchronous: bool = False
    """True if each worker takes its own steps (async_sgd). The run's steps and samples are then
    sums over the workers."""
    batch: int = 0
    """Key of the last batch whose push was committed; 0 if pushes do not belong to batches."""
    unpushed_steps: int = 0
    """Number of inner steps since the last push. They are included in `commits`, although the
    servers have not received them."""
    unpushed_samples: int = 0
    """Number of samples in the `unpushed_steps`."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A worker's counts at one moment."""

    counts: Counts
    spans: tuple[Span, ...]
    """The newest spans, oldest first; the last one may continue."""
    spans_before: int
    """Number of earlier spans."""
    in_doubt: int = 0
    """Key of a batch whose push has started but is not yet counted as a commit; 0 if there is none.
    If the worker dies at this point, the push may or may not have reached the servers."""
    known: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Key -> steps and samples of batches that a different worker had already pushed. They are not
    counted as commits here: the other worker has counted them, or has them `in_doubt`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of each metric that the script reports in addition to the loss, by name;
    finite."""
    strategy: str = ""
    """Name of the worker's strategy."""

    @property
    def steps(self) -> int:
        """Number of committed steps of the run or, if it is asynchronous, of this worker."""
        return self.spans[-1].steps

    @property
    def own_steps(self) -> int:
        """Number of this worker's steps that the servers have received."""
        return self.steps - self.counts.steps_before - self.counts.unpushed_steps

    @property
    def own_samples(self) -> int:
        """Number of samples in this worker's steps that the servers have received."""
        return self.counts.samples - self.counts.samples_before - self.counts.unpushed_samples


class TallyWriter:
    """Writes the tally file of a worker. Only the worker's training thread uses it."""

    def __init__(self, path: Path, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Creates the tally file. Raises OSError if there is no space for the file or its directory
        does not exist."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # raises an error if there is no space; writing to an unallocated page would instead
            # raise a signal
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
        """Records that a push has started. `batch`: key of the pushed batch; 0: records that no
        push is in progress."""
        struct.pack_into("<Q", self._memory, _PUSHING_AT, batch)

    def known(self, batch: int, steps: int, samples: int) -> None:
        """Records that the batch, or the round of `steps` steps, that this worker was about to push
        had already been pushed by a different worker. `batch`: key of the batch or round."""
        self.pushing(0)
        _KNOWN.pack_into(
            self._memory, _KNOWN_AT + self._known % _MOST_KNOWN * _KNOWN.size, batch, steps, samples
        )
        self._known += 1

    def committed(self, counts: Counts, *, generation: int, steps: int) -> None:
        """Records that a step was committed in `generation`. `steps`: number of committed steps of
        the run, including this one."""
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

    def metrics(self, values: Iterable[tuple[str, float]]) -> None:
        """Overwrites the reported metrics. `values`: at most `MOST_METRICS` names and values, in an
        order that never changes; new names are added at the end."""
        for place, (name, value) in enumerate(values):
            encoded = name.encode()[:256]
            _METRIC.pack_into(self._memory, _METRICS_AT + place * _METRIC.size, encoded, value)

    def strategy(self, name: str) -> None:
        """Records the name of the worker's strategy. Must be called once, before the first
        commit."""
        encoded = name.encode()[:_STRATEGY_BYTES]
        self._memory[_STRATEGY_AT : _STRATEGY_AT + len(encoded)] = encoded

    def recount(self, counts: Counts) -> None:
        """Replaces the counts without recording a commit, for counts that change between
        commits."""
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
    """Reads a worker's tally from its file. Returns None if the file cannot be read, is not a
    tally, or records no commits."""
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
    # the writer may be overwriting the oldest one
    kept = range(max(0, finished - MOST_SPANS + 1), finished)
    ring = [
        Span(*_SPAN.unpack_from(content, _RING_AT + number % MOST_SPANS * _SPAN.size))
        for number in kept
    ]
    written = Counts(*_COUNTS.unpack(counts))
    (pushing,) = struct.unpack_from("<Q", content, _PUSHING_AT)
    known = {
        key: (steps, samples)
        for key, steps, samples in _KNOWN.iter_unpack(content[_KNOWN_AT:_METRICS_AT])
        if key
    }
    metrics = {
        name.rstrip(b"\0").decode(errors="replace"): value
        for name, value in _METRIC.iter_unpack(content[_METRICS_AT:_STRATEGY_AT])
        if name[0] and math.isfinite(value)
    }
    return Tally(
        counts=written,
        spans=(*ring, Span(*_SPAN.unpack(span))),
        spans_before=kept.start,
        in_doubt=pushing if pushing != written.batch else 0,
        known=known,
        metrics=metrics,
        strategy=content[_STRATEGY_AT:_SIZE].rstrip(b"\0").decode(errors="replace"),
    )
