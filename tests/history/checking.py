"""Judges a recorded history (recording.py). Each promise is a function that returns the violations
that it finds. The functions are pure, except that they read files.

The changes to a partition are ordered by version, as its servers recorded them when they made them.
A recovery or a backup must repeat exactly the same changes. So each partition has one history, with
which all other records are compared:

    changes_are_one_history    a version is one change with one outcome, on all servers and across
                               restarts, and no version is missing
    applied_once               no push and no batch is applied twice; only pushes that a worker has
                               sent are applied, in the order of their numbers
    none_lost                  acknowledged pushes are in the history, at the acknowledged version
    versions_are_monotonic     a later request never gets an older version; each version has the
                               same values for all readers
    optimizer_is_adam          torch's Adam in one process, given the same changes, has the same
                               bits in each version, and the same moments
    rows_are_their_pushes      the same holds for the rows of a sparse table, as found by lookups,
                               and for their eviction
    bound_is_kept              no pull was served to a member that was further ahead of the slowest
                               one than the bound
    iterations_are_apart       under bsp, all pushes of an iteration were computed on the result of
                               the previous one
    samples_count_once         every sample of every epoch that began counts once, and every batch
                               is on every partition

`clock_checks` has the functions about clocks and `row_checks` the one about rows. `lines` defines a
history, and which of its lines count.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shoal_common.errors import ShoalError
from shoal_worker.data.record import audit
from shoal_worker.sparse_tables.embedding import SparseEmbedding

from tests.history.clock_checks import bound_is_kept, iterations_are_apart
from tests.history.lines import History, Line, Seen, Violation, digest
from tests.history.row_checks import rows_are_their_pushes
from tests.history.snapshots import read_snapshot


def changes_are_one_history(history: History) -> Iterator[Violation]:
    made: dict[tuple[int, int], Line] = {}
    for line in history.valid:
        partition, version = line["partition"], line["version"]
        first = history.changes.get(partition, {}).get(version)
        if first is None:
            yield Violation(
                f"partition {partition} came out of a snapshot at version {version}, to which no "
                "change has led",
                [line],
            )
            continue
        same = (
            ["digest"]
            if line["kind"] == "restored"
            else ["sequence", "batch", "gradient", "digest"]
        )
        if line["kind"] == "applied" and line["sequence"]:
            # whose first values they were nobody keeps
            same.append("member")
        if any(first[name] != line[name] for name in same):
            yield Violation(
                f"version {version} of partition {partition} is not what it was when it was made "
                "first",
                [first, line],
            )
        elif (
            line["kind"] == "applied"
            and not line["again"]
            and (other := made.setdefault((partition, version), line)) is not line
        ):
            yield Violation(
                f"{other['of']} and {line['of']} both made version {version} of partition "
                f"{partition} as primaries",
                [other, line],
            )
    for partition, versions in history.changes.items():
        put_in_place = next(
            (version for version, line in versions.items() if "restoration" in line.fields), 1
        )
        missing = sorted({1, *range(put_in_place, max(versions) + 1)} - versions.keys())
        if missing:
            yield Violation(
                f"partition {partition} came to version {max(versions)} without a change to "
                f"version {missing[0]}"
            )
        if pushed := [line for version, line in versions.items() if 1 < version < put_in_place]:
            what = (
                "a checkpoint's rows took the place of what had been pushed to partition "
                f"{partition}"
            )
            yield Violation(what, [pushed[0], versions[put_in_place]])


def applied_once(history: History) -> Iterator[Violation]:
    for partition, versions in history.changes.items():
        pushes: dict[tuple[str, int], Line] = {}
        batches: dict[int, Line] = {}
        newest: dict[str, Line] = {}
        for line in versions.values():
            if not line["sequence"]:
                continue
            member, sequence, batch = line["member"], line["sequence"], line["batch"]
            if (other := pushes.setdefault((member, sequence), line)) is not line:
                yield Violation(
                    f"push {sequence} of {member} was applied twice to partition {partition}",
                    [other, line],
                )
            if batch and (other := batches.setdefault(batch, line)) is not line:
                yield Violation(
                    f"batch {batch} was applied twice to partition {partition}", [other, line]
                )
            if (before := newest.get(member)) is not None and before["sequence"] > sequence:
                yield Violation(
                    f"push {sequence} of {member} was applied to partition {partition} after a "
                    "later one",
                    [before, line],
                )
            newest[member] = line
            if history.push_of(line) is None:
                yield Violation(
                    f"what was applied to partition {partition} as push {sequence} of {member} was "
                    "never sent",
                    [line],
                )


def none_lost(history: History) -> Iterator[Violation]:
    pushes = {
        (p, c["member"], c["sequence"]): c
        for p, versions in history.changes.items()
        for c in versions.values()
        if c["sequence"]
    }
    batches = {
        (p, c["batch"]): c
        for p, versions in history.changes.items()
        for c in versions.values()
        if c["batch"]
    }
    answers = [
        (line["of"], answer, line, True)
        for line in history.of_workers("pushed")
        for answer in line["answers"]
    ]
    answers += [(line["member"], line.fields, line, False) for line in history.of_servers("known")]
    for member, answer, line, by_worker in answers:
        partition, sequence, batch = answer["partition"], answer["sequence"], answer["batch"]
        push, same_batch = (
            pushes.get((partition, member, sequence)),
            batches.get((partition, batch)),
        )
        if push is not None and push["batch"] != batch:
            push = None
        known = not by_worker or answer["duplicate"]
        made = push or same_batch if known else push
        name = f"push {sequence} of {member} (batch {batch}) to partition {partition}"
        if made is None:
            another = pushes.get((partition, member, sequence))
            yield Violation(
                f"{name} was acknowledged, and is lost",
                [line] if another is None else [line, another],
            )
        elif made["version"] > answer["version"] or (
            not known and made["version"] != answer["version"]
        ):
            yield Violation(
                f"{name} was acknowledged at version {answer['version']}, and led to "
                f"{made['version']}",
                [line, made],
            )


def versions_are_monotonic(history: History) -> Iterator[Violation]:
    by_partition: dict[int, list[Seen]] = defaultdict(list)
    for seen in history.seen:
        by_partition[seen.partition].append(seen)
        if seen.digest:
            change = history.changes.get(seen.partition, {}).get(seen.version)
            if change is None:
                yield Violation(
                    f"a pull gave version {seen.version} of partition {seen.partition}, which no "
                    "server has had",
                    [seen.line],
                )
            elif not seen.ids and change["digest"] != seen.digest:
                what = (
                    f"a pull gave version {seen.version} of partition {seen.partition} with "
                    "other values than the server had"
                )
                yield Violation(what, [change, seen.line])
    for partition, all_seen in by_partition.items():
        ended = sorted(all_seen, key=lambda seen: seen.ended)
        newest: list[Seen] = []
        """Entry of `ended` with the newest version so far, for each of them."""
        for seen in ended:
            newest.append(seen if not newest or seen.version >= newest[-1].version else newest[-1])
        ends = [seen.ended for seen in ended]
        for seen in all_seen:
            place = bisect.bisect_left(ends, seen.begun) - 1
            if place >= 0 and newest[place].version > seen.version and not history.may_be_old(seen):
                what = (
                    f"version {seen.version} of partition {partition} was told after version "
                    f"{newest[place].version} had been"
                )
                yield Violation(what, [newest[place].line, seen.line])


def optimizer_is_adam(
    history: History, snapshots: Sequence[Path], settings: Mapping[str, Any]
) -> Iterator[Violation]:
    """`snapshots`: written by the servers when they ended. `settings`: of torch.optim.Adam."""
    held: set[int] = set()
    for path in snapshots:
        state, tensors = read_snapshot(path)
        pieces = {
            number: [piece[2] for piece in pieces]
            for number, _, pieces, *_ in state["state"]["layout"]["partitions"]
        }
        for entry in state["partitions"]:
            partition = entry["partition_id"]
            held.add(partition)
            if partition in history.buckets:
                continue  # rows_are_their_pushes checks them
            yield from _steps_like_adam(
                history, partition, pieces[partition], entry, tensors, settings
            )
    for partition in sorted(history.changes.keys() - held):
        yield Violation(f"no snapshot has partition {partition}")


def _steps_like_adam(
    history: History,
    partition: int,
    lengths: Sequence[int],
    entry: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
) -> Iterator[Violation]:
    changes = list(history.changes[partition].values())
    if entry["version"] != changes[-1]["version"]:
        what = (
            f"partition {partition} came to version {changes[-1]['version']}, and ended at "
            f"{entry['version']}"
        )
        yield Violation(what, [changes[-1]])
        return
    given = history.given.get((partition, changes[0]["gradient"]))
    if given is None:
        yield Violation(
            f"partition {partition} began with values that no worker gave", [changes[0]]
        )
        return
    # Parameters with the same hyperparameters and history are one tensor to torch. With other
    # boundaries, the last bits of some elements would differ.
    ends = [sum(lengths[:end]) for _, end in entry["runs"]]
    cut = [end - begin for begin, end in pairwise((0, *ends))]
    parameters = [torch.nn.Parameter(part.clone()) for part in _floats(given["values"]).split(cut)]
    optimizer = torch.optim.Adam(parameters, fused=True, **settings)
    for change in changes[1:]:
        sent = history.push_of(change)
        if sent is None:
            return  # applied_once reports it
        assert not sent["absent"], "every parameter of the workers' network has a gradient"
        for parameter, gradient in zip(
            parameters, _floats(sent["gradient"]).split(cut), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
        if digest(_joined(parameters)) != change["digest"]:
            yield Violation(
                f"version {change['version']} of partition {partition} is not what Adam makes of "
                "its pushes",
                [sent, change],
            )
            return
    found = {"values": tensors[f"{partition}:values"]}
    mine = {"values": _joined(parameters)}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        found[name] = torch.cat(
            [tensors[f"{partition}:state:{place}:{name}"].reshape(-1) for place in range(len(cut))]
        )
        mine[name] = _joined(
            [optimizer.state[parameter][name].reshape(-1) for parameter in parameters]
        )
    for name, tensor in found.items():
        if not torch.equal(tensor, mine[name]):
            yield Violation(
                f"{name} of partition {partition} differ in the snapshot from what Adam has in one "
                "process"
            )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts])


def _floats(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.float32).copy())


# -------------------------------------------------------------------------------------- the samples


def samples_count_once(history: History, records: Path, batch_size: int) -> Iterator[Violation]:
    """`records`: records of samples (shoal_worker.data.record)."""
    try:
        verdict = audit(records)
    except ShoalError as error:
        yield Violation(f"the record of samples contradicts itself: {error}")
        return
    batches = 0
    for epoch in verdict.epochs:
        batches += -(-epoch.expected // batch_size)
        if not epoch.exactly_once:
            yield Violation(
                f"epoch {epoch.epoch}: {epoch.lost} samples lost {epoch.lost_samples}, "
                f"{epoch.repeated} repeated {epoch.repeated_samples}"
            )
    keys = {
        partition: {c["batch"] for c in versions.values() if c["sequence"]}
        for partition, versions in history.changes.items()
    }
    for partition, here in keys.items():
        if len(here) != batches:
            elsewhere = set.union(*keys.values()) - here
            what = (
                f"{batches} batches were dealt and finished, partition {partition} has "
                f"{len(here)} of them"
            )
            yield Violation(
                what, [line for line in history.of_workers("push") if line["batch"] in elsewhere]
            )


# -------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True, kw_only=True)
class Job:
    """The configuration that a history is checked against."""

    records: Path
    snapshots: Sequence[Path]
    adam: Mapping[str, Any]
    batch_size: int
    bound: int | None = None
    """Staleness bound, under ssp."""
    in_step: bool = False
    """True under bsp."""
    table: SparseEmbedding | None = None
    """The sparse table; None: the model has none."""


def promises(
    history: History, job: Job, *, ended_well: bool
) -> Mapping[str, Callable[[], Iterator[Violation]]]:
    """Returns each promise, as a sentence, with the function that finds its violations. If the job
    did not end well, promises about its end are left out."""
    held: dict[str, Callable[[], Iterator[Violation]]] = {
        "no acknowledged push is lost": lambda: none_lost(history),
        "no push and no batch is applied twice": lambda: applied_once(history),
        "a restart changes nothing that was there": lambda: changes_are_one_history(history),
        "versions only grow, and each has one set of values": lambda: versions_are_monotonic(
            history
        ),
    }
    if ended_well:
        held["values and moments are those of Adam in one process, to the bit"] = lambda: (
            optimizer_is_adam(history, job.snapshots, job.adam)
        )
        held["each sample of an epoch counts once"] = lambda: samples_count_once(
            history, job.records, job.batch_size
        )
    if (table := job.table) is not None:
        at_the_end = job.snapshots if ended_well else None
        held[
            "rows, evicted ones and those of lookups are what Adagrad in one process makes of the "
            "pushes, to the bit"
        ] = lambda: rows_are_their_pushes(history, at_the_end, table)
    if (bound := job.bound) is not None:
        held[f"nobody goes on more than {bound} ahead of the slowest"] = lambda: bound_is_kept(
            history, bound
        )
    if job.in_step:
        held["all compute an iteration on what the one before ended with"] = lambda: (
            iterations_are_apart(history)
        )
    return held
