"""Records every sample that is passed to a training loop and every committed step, and audits these
records.

Training only writes the records; the audit checks them afterwards. There is one file of JSON lines
per member, `<member_id>.jsonl`. Each line is a single write to a file opened with O_APPEND, so
written lines survive a SIGKILL. The audit tolerates an incomplete last line.

    {"kind": "dealt", "loader", "generation", "epoch", "step", "rank", "index", "begin", "first",
     "samples": [...], "expected", "dataset", "drawn"}
        written when a batch is passed to the loop
    {"kind": "committed", "loader", "generation", "epoch", "step", "begin"}
        synchronous: this rank has committed the step
    {"kind": "finished", "loader", "generation", "epoch", "step", "known"}
        leased: this member's push of batch `step` has been acknowledged; known: the servers had
        already received the batch's push from another member

`samples` are the dataset indices fetched, at positions `first`, `first` + 1, ... of the epoch's
order; empty for a stand-in batch. `begin` is the step's first position, and `index` is the index of
the micro-batch in the step (without micro-batches, the rank). `expected` is the number of samples
in a complete epoch, and `dataset` is the dataset's length. `drawn` is true if a sampler determined
the order. For a stream, `samples` are positions, or (shard << 32) + the index in the shard;
`dataset` is -1, and `expected` grows until the stream's end is known.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_common.errors import ConfigurationError, CorruptDataError


class SampleRecord:
    """Appends lines to one member's record file. Safe to use from several threads."""

    def __init__(self, directory: Path, member_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            directory / f"{member_id}.jsonl",
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
            0o644,
        )

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one line to the file."""
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(
                "a line of the sample record was written only in part, because the disk is full"
            )

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


@dataclass(frozen=True, kw_only=True)
class EpochAudit:
    """Audit result for one epoch of one loader."""

    loader: str
    epoch: int
    expected: int
    """Number of samples in a complete epoch."""
    once: int
    """Number of samples that count exactly once."""
    lost: int
    """Number of samples that never count: dropped because of a fault, or not reached before the run
    ended."""
    repeated: int
    """Number of samples that count more than once."""
    lost_samples: tuple[int, ...]
    """The lost samples, if they can be identified. Always empty with `drop_last`, which omits some
    samples on purpose."""
    repeated_samples: tuple[int, ...]

    @property
    def exactly_once(self) -> bool:
        """True if the epoch is complete and every sample counts exactly once."""
        return self.lost == 0 and self.repeated == 0


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Audit result for a directory of records. Samples are dataset indices, or positions if a
    sampler determined the order."""

    epochs: tuple[EpochAudit, ...]
    """Audited epochs of all loaders. Epochs whose batches no loop received are omitted."""

    @property
    def once(self) -> int:
        """Number of samples that count exactly once, over all epochs."""
        return sum(epoch.once for epoch in self.epochs)

    @property
    def lost(self) -> int:
        """Number of samples that never count, over all epochs."""
        return sum(epoch.lost for epoch in self.epochs)

    @property
    def repeated(self) -> int:
        """Number of samples that count more than once, over all epochs."""
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def exactly_once(self) -> bool:
        """True if every epoch from which a loop received a batch is complete, and every sample in
        it counts exactly once."""
        return all(epoch.exactly_once for epoch in self.epochs)


def audit(directory: Path) -> Audit:
    """Audits all records of one job in `directory`.

    A step counts if a rank committed it and no later generation resumed from an earlier position:
    the first position that a generation commits invalidates everything that earlier generations
    committed from that position on. The samples of a step are all samples that were passed to any
    member for this step in this generation. A finished leased batch counts once for each member
    that was the first to push it, according to its record. If no member was, because the one that
    pushed first died after its push, the batch counts once.

    Raises:
        ConfigurationError: `directory` does not exist.
        CorruptDataError: a line other than a file's last is not a record.
    """
    if not directory.is_dir():
        raise ConfigurationError(
            f"there is no directory of sample records at {directory}; was SHOAL_RECORD_DIR set "
            "for the workers?"
        )
    by_loader: dict[str, _Lines] = defaultdict(_Lines)
    for file in sorted(directory.glob("*.jsonl")):
        for line in _read(file):
            by_loader[line["loader"]].add(file.stem, line)
    return Audit(
        epochs=tuple(
            verdict for loader in sorted(by_loader) for verdict in by_loader[loader].judge(loader)
        )
    )


_FIELDS = {
    "dealt": {
        "loader",
        "generation",
        "epoch",
        "step",
        "rank",
        "index",
        "begin",
        "first",
        "samples",
        "expected",
        "dataset",
        "drawn",
    },
    "committed": {"loader", "generation", "epoch", "step", "begin"},
    "finished": {"loader", "generation", "epoch", "step", "known"},
}


def _read(file: Path) -> Iterator[dict[str, Any]]:
    raw = file.read_bytes()
    whole, _, _torn = raw.rpartition(b"\n")
    for number, text in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            line = json.loads(text)
            missing = _FIELDS[line["kind"]] - line.keys()
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptDataError(
                f"{file}:{number} is not a line of a sample record: {text[:80]!r}"
            ) from error
        if missing:
            raise CorruptDataError(
                f"{file}:{number} is a {line['kind']!r} line of a sample record, but lacks "
                f"{', '.join(sorted(missing))}"
            )
        yield line


class _Lines:
    """One loader's lines from the records of all members."""

    def __init__(self) -> None:
        # If a step was aborted and dealt again within one generation, later lines replace earlier
        # lines: the step was committed with the samples that were passed last.
        self._dealt: dict[tuple[int, int, int], dict[tuple[str, int], dict[str, Any]]] = (
            defaultdict(dict)
        )
        self._leased: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._begins: dict[tuple[int, int, int], int] = {}
        self._finished: list[tuple[str, int, int]] = []
        self._known: list[tuple[str, int, int]] = []

    def add(self, member: str, line: dict[str, Any]) -> None:
        step = line["generation"], line["epoch"], line["step"]
        match line["kind"]:
            case "dealt":
                self._dealt[step][member, line["index"]] = line
                self._leased[member, line["epoch"], line["step"]] = line
            case "committed":
                self._begins[step] = line["begin"]
            case "finished":
                (self._known if line["known"] else self._finished).append(
                    (member, line["epoch"], line["step"])
                )

    def judge(self, loader: str) -> Iterator[EpochAudit]:
        counted: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for step in self._steps_that_count():
            counted[step[1]] += self._dealt[step].values()
        first = {(epoch, batch) for _, epoch, batch in self._finished}
        others = {
            (epoch, batch): member
            for member, epoch, batch in self._known
            if (epoch, batch) not in first
        }
        for member, epoch, batch in (
            *self._finished,
            *((member, *place) for place, member in others.items()),
        ):
            if (member, epoch, batch) not in self._leased:
                raise CorruptDataError(
                    f"according to the sample record, member {member} finished batch {batch} of "
                    f"epoch {epoch} of {loader!r}, but never leased it"
                )
            counted[epoch].append(self._leased[member, epoch, batch])
        # A stream's lines contain only the number of samples dealt so far: the largest number is
        # the total.
        by_expected = sorted(
            (line for lines in self._dealt.values() for line in lines.values()),
            key=lambda line: line["expected"],
        )
        last = {line["epoch"]: line for line in by_expected}
        for epoch in sorted(last):
            yield _judge_epoch(loader, last[epoch], counted[epoch])

    def _steps_that_count(self) -> list[tuple[int, int, int]]:
        counting = []
        limit: tuple[int, int] | None = None
        for generation in sorted({step[0] for step in self._begins}, reverse=True):
            places = {
                step: (step[1], begin)
                for step, begin in self._begins.items()
                if step[0] == generation
            }
            counting += [step for step, place in places.items() if limit is None or place < limit]
            first = min(places.values())
            limit = first if limit is None else min(limit, first)
        return counting


def _judge_epoch(loader: str, like: dict[str, Any], lines: Iterable[dict[str, Any]]) -> EpochAudit:
    drawn, expected = like["drawn"], like["expected"]
    seen: Counter[int] = Counter()
    for line in lines:
        seen.update(
            range(line["first"], line["first"] + len(line["samples"])) if drawn else line["samples"]
        )
    repeated = sorted(sample for sample, times in seen.items() if times > 1)
    nameable = expected if drawn else expected == like["dataset"] and expected
    return EpochAudit(
        loader=loader,
        epoch=like["epoch"],
        expected=expected,
        once=len(seen) - len(repeated),
        lost=max(0, expected - len(seen)),
        repeated=len(repeated),
        lost_samples=tuple(sample for sample in range(nameable) if sample not in seen),
        repeated_samples=tuple(repeated),
    )
