"""The checks find violations that were inserted by hand into a correct history of a sparse table's
bucket."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from shoal_common.tables.file import BucketImage
from shoal_common.tables.rows import Rows, RowsImage
from shoal_common.tables.wire import pulled_ids, pushed_payload
from shoal_worker.sparse_tables.embedding import SparseEmbedding

from tests.history.checking import (
    applied_once,
    changes_are_one_history,
    none_lost,
    versions_are_monotonic,
)
from tests.history.lines import History, Line, Violation, digest, rows_digest
from tests.history.row_checks import rows_are_their_pushes

DIM, MOST, AGE = 3, 16, 8
Fields = dict[str, Any]
adagrad = partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01)
TABLE = SparseEmbedding(
    None, DIM, name="users", optimizer=adagrad, seed=5, buckets=1, max_rows=MOST, max_age=AGE
)
HOT, NEVER_PUSHED = 1, 1 << 40


class Right:
    """A correct history, into which tests insert violations: a server with a table of one bucket,
    and two members who look up and push in turn. Each push has one row that all pushes share, and
    three others. Rows are evicted by number and by age."""

    def __init__(self, *, times: Mapping[int, int] | None = None, iterations: int = 12) -> None:
        """`times`: version -> number of times that the push for this version is applied to the
        rows; default: once."""
        self._times = times or {}
        self.now = 0
        self.calls = 0
        self.server: list[Fields] = []
        self.workers: dict[str, list[Fields]] = {"a": [], "b": []}
        self.rows = Rows(TABLE.spec, DIM)
        self.version = 1
        self.evicted = 0
        self._generator = np.random.default_rng(0)
        self.serve("starts", pid=1, address="s:1")
        self.serve("members", generation=1, members=["a", "b"])
        begun: Fields = {
            "partition": 7,
            "version": 1,
            "member": "",
            "sequence": 0,
            "batch": 0,
            "clock": 0,
            "gradient": "",
            "bucket": 0,
        }
        self.serve("applied", **begun, digest=rows_digest(self.rows.image()), again=True)
        for iteration in range(1, iterations + 1):
            for place, member in enumerate("ab"):
                batch = 2 * iteration + place
                ids = [HOT, *range(4 * batch, 4 * batch + 3)] if batch < 14 else [HOT]
                self.look_up(member, [*ids, NEVER_PUSHED])
                self.push(member, iteration, batch, ids)
        if iterations:
            self.look_up("a", [HOT, 4 * 13, NEVER_PUSHED])

    def serve(self, kind: str, **fields: Any) -> Fields:
        self.now += 1
        self.server.append({"kind": kind, "t": self.now, "of": "server", "span": 1, **fields})
        return self.server[-1]

    def work(self, of: str, kind: str, /, **fields: Any) -> Fields:
        self.now += 1
        self.workers[of].append(
            {"kind": kind, "t": self.now, "of": of, "call": self.calls, **fields}
        )
        return self.workers[of][-1]

    def look_up(self, member: str, ids: Sequence[int]) -> None:
        self.calls += 1
        self.work(member, "pull", member="", clock=0, at="s:1")
        wanted = np.array(ids, dtype=np.int64)
        found = digest(self.rows.values(wanted).tobytes())
        answer = {
            "partition": 7,
            "version": self.version,
            "unchanged": False,
            "digest": found,
            "ids": pulled_ids(wanted).hex(),
        }
        self.work(member, "pulled", answers=[answer])

    def push(self, member: str, sequence: int, batch: int, numbers: Sequence[int]) -> None:
        self.calls += 1
        ids = np.array(numbers, dtype=np.int64)
        gradients = self._generator.standard_normal((len(ids), DIM), dtype=np.float32)
        payload = pushed_payload(ids, gradients)
        named = {"partition": 7, "sequence": sequence, "batch": batch}
        more = {
            "member": member,
            "base": self.version,
            "clock": sequence,
            "absent": [],
            "at": "s:1",
        }
        self.work(member, "push", **named, **more, gradient=payload.hex())
        before = len(self.rows) + self.rows.count_new(ids)
        for _ in range(self._times.get(self.version + 1, 1)):
            self.rows.update(ids, gradients, self.version)
        self.evicted += before - len(self.rows)
        self.version += 1
        made = {
            **named,
            "version": self.version,
            "member": member,
            "clock": sequence,
            "gradient": digest(payload),
        }
        self.serve("applied", **made, digest=rows_digest(self.rows.image()), again=False)
        self.work(
            member,
            "pushed",
            answers=[{**named, "version": self.version, "duplicate": False, "known": False}],
        )

    def history(self) -> History:
        return History(
            servers={"server": list(map(Line, self.server))},
            workers={member: list(map(Line, lines)) for member, lines in self.workers.items()},
        )

    def last(self, kind: str, member: str = "") -> Fields:
        """Returns the last line of a kind, from the server or from a member."""
        return [
            line
            for line in (self.workers[member] if member else self.server)
            if line["kind"] == kind
        ][-1]


@pytest.fixture
def right() -> Right:
    return Right()


CHECKS: dict[str, Callable[[History], Iterator[Violation]]] = {
    "one history": changes_are_one_history,
    "applied once": applied_once,
    "none lost": none_lost,
    "monotonic": versions_are_monotonic,
    "rows": lambda history: rows_are_their_pushes(history, None, TABLE),
}


def found(right: Right, check: str) -> list[str]:
    return [violation.what for violation in CHECKS[check](right.history())]


@pytest.mark.parametrize("check", CHECKS)
def test_correct_history_of_rows_breaks_no_promise(right: Right, check: str) -> None:
    assert found(right, check) == []
    assert right.evicted > MOST, "rows go for their number, and for their age"


def test_acknowledged_push_of_rows_that_was_not_applied_is_reported_lost(right: Right) -> None:
    right.server.remove(right.last("applied"))
    assert found(right, "none lost") == [
        "push 12 of b (batch 25) to partition 7 was acknowledged, and is lost"
    ]


@pytest.mark.parametrize("times", [0, 2])
def test_push_of_rows_applied_twice_or_never_but_counted_once_is_found(
    times: int,
) -> None:
    right = Right(times={9: times})
    assert found(right, "rows") == [
        "version 9 of partition 7 does not have the rows that its pushes make"
    ]
    for check in CHECKS.keys() - {"rows"}:
        assert found(right, check) == []


def test_push_of_rows_applied_twice_is_found(right: Right) -> None:
    right.serve(**{**right.last("applied"), "version": right.version + 1})
    assert found(right, "applied once") == [
        "push 12 of b was applied twice to partition 7",
        "batch 25 was applied twice to partition 7",
    ]


def test_rows_that_a_recovery_computes_differently_are_found(right: Right) -> None:
    right.serve(
        "restored", partition=7, version=right.version, digest=right.last("applied")["digest"]
    )
    assert found(right, "one history") == []
    right.serve(
        "restored", partition=7, version=right.version - 1, digest=right.last("applied")["digest"]
    )
    assert found(right, "one history") == [
        f"version {right.version - 1} of partition 7 is not what it was when it was made first"
    ]


def put_in_place(right: Right, *, version: int, number: int = HOT) -> None:
    """Restores a bucket of a checkpoint at this version on a server, after all of its changes."""
    image = RowsImage(
        ids=np.array([number], dtype=np.int64),
        values=np.ones((1, DIM), dtype=np.float32),
        state={"sum": np.ones((1, DIM), dtype=np.float32)},
        updated_at=np.array([version - 1], dtype=np.int64),
    )
    file = b"".join(
        BucketImage(table="users", number=0, buckets=1, version=version, rows=image).encoded().parts
    )
    right.work("a", "values", partition=7, values=file.hex())
    made: Fields = {
        "partition": 7,
        "version": version,
        "member": "",
        "sequence": 0,
        "batch": 0,
        "clock": 0,
        "gradient": digest(file),
    }
    right.serve("applied", **made, digest=rows_digest(image), again=False, restoration=1)


def test_bucket_starts_with_the_rows_of_its_checkpoint() -> None:
    right = Right(iterations=0)
    put_in_place(right, version=40)
    for check in CHECKS:
        assert found(right, check) == []
    right.last("applied")["digest"] = "0"
    assert found(right, "rows") == [
        "version 40 of partition 7 does not have the rows that its pushes make"
    ]
    right.last("applied")["gradient"] = "0"
    assert found(right, "rows") == ["partition 7 was given rows that no worker sent"]


def test_checkpoint_rows_that_replace_pushed_rows_are_found(
    right: Right,
) -> None:
    put_in_place(right, version=40)
    assert found(right, "one history") == [
        "a checkpoint's rows took the place of what had been pushed to partition 7"
    ]


def test_bucket_that_starts_over_is_found(right: Right) -> None:
    begun = next(line for line in right.server if line["kind"] == "applied")
    right.serve(**begun)
    assert found(right, "one history") == []
    right.serve(
        **{
            **right.last("applied"),
            "version": 2,
            "again": False,
            "member": "b",
            "sequence": 13,
            "batch": 26,
        }
    )
    assert "version 2 of partition 7 is not what it was when it was made first" in found(
        right, "one history"
    )


def test_lookup_of_older_rows_than_reported_before_is_found(right: Right) -> None:
    older = copy.deepcopy(
        [line for line in right.workers["b"] if line["kind"] == "pulled"][-1]["answers"]
    )
    right.calls += 1
    right.work("b", "pull", member="", clock=0, at="s:1")
    right.work("b", "pulled", answers=older)
    assert found(right, "rows") == []
    assert found(right, "monotonic") == [
        "version 24 of partition 7 was told after version 25 had been"
    ]


def test_a_lookup_of_older_rows_under_a_newer_version_is_found(right: Right) -> None:
    older = [line for line in right.workers["a"] if line["kind"] == "pulled"][-2]["answers"][0]
    newer = right.last("pulled", "b")["answers"][0]
    assert older["ids"] == newer["ids"]
    newer["digest"] = older["digest"]
    assert found(right, "monotonic") == []
    assert found(right, "rows") == [
        "a lookup found other rows in version 24 of partition 7 than its pushes make"
    ]


def test_a_lookup_at_a_version_that_no_server_had_is_found(right: Right) -> None:
    right.last("pulled", "a")["answers"][0]["version"] += 1
    assert found(right, "monotonic") == [
        "a pull gave version 26 of partition 7, which no server has had"
    ]


def test_lookup_of_rows_neither_pushed_nor_derived_from_the_seed_is_found(
    right: Right,
) -> None:
    answer = right.last("pulled", "a")["answers"][0]
    fresh = np.array([NEVER_PUSHED], dtype=np.int64)
    answer |= {"ids": pulled_ids(fresh).hex(), "digest": digest(right.rows.values(fresh).tobytes())}
    assert found(right, "rows") == []
    answer["digest"] = digest(np.zeros((1, DIM), dtype=np.float32).tobytes())
    assert found(right, "rows") == [
        "a lookup found other rows in version 25 of partition 7 than its pushes make"
    ]


@pytest.mark.parametrize("limits", [{"max_rows": MOST}, {"max_age": AGE}])
def test_rows_evicted_too_early_are_found(right: Right, limits: dict[str, int]) -> None:
    """The history is correct for a table with both limits, but not for one that lacks either."""
    table = SparseEmbedding(None, DIM, name="users", optimizer=adagrad, seed=5, buckets=1, **limits)
    what = [violation.what for violation in rows_are_their_pushes(right.history(), None, table)]
    assert [each.rpartition(" of ")[2] for each in what] == [
        "partition 7 does not have the rows that its pushes make"
    ]


def test_an_id_in_two_buckets_is_found(right: Right) -> None:
    """The changes to the bucket are repeated for another bucket."""
    two = SparseEmbedding(
        None,
        DIM,
        name="users",
        optimizer=adagrad,
        seed=5,
        buckets=2,
        max_rows=2 * MOST,
        max_age=AGE,
    )
    lines = [line for line in right.server if line["kind"] == "applied"]
    pushes = [
        (member, line)
        for member, all_lines in right.workers.items()
        for line in all_lines
        if line["kind"] == "push"
    ]
    for line in lines:
        right.serve(**{**line, "partition": 8})
    for member, line in pushes:
        right.workers[member].append({**line, "partition": 8})
    what = {violation.what for violation in rows_are_their_pushes(right.history(), None, two)}
    assert f"id {HOT} is in partitions 7 and 8" in what


def test_bucket_that_no_server_started_is_found(right: Right) -> None:
    two = SparseEmbedding(
        None,
        DIM,
        name="users",
        optimizer=adagrad,
        seed=5,
        buckets=2,
        max_rows=2 * MOST,
        max_age=AGE,
    )
    violations = list(rows_are_their_pushes(right.history(), None, two))
    assert [violation.what for violation in violations] == [
        "the table has 2 buckets, and servers began 1"
    ]


def ended(right: Right, directory: Path, *, version: int) -> list[str]:
    """Returns the violations found if the server ends with its current rows at this version."""
    path, image = directory / "snapshot.safetensors", right.rows.image()
    arrays = {
        "ids": image.ids,
        "values": image.values,
        "updated_at": image.updated_at,
        "state:sum": image.state["sum"],
    }
    metadata = {"shoal": json.dumps({"partitions": [{"partition_id": 7, "version": version}]})}
    save_file({f"7:rows:{name}": array for name, array in arrays.items()}, path, metadata=metadata)
    return [violation.what for violation in rows_are_their_pushes(right.history(), [path], TABLE)]


def test_rows_on_disk_that_differ_from_the_last_version_are_found(
    right: Right, tmp_path: Path
) -> None:
    assert ended(right, tmp_path, version=right.version) == []
    assert ended(right, tmp_path, version=right.version - 1) == [
        "the rows of partition 7, which came to version 25, are others at version 24 in the "
        "snapshot"
    ]
    right.rows.update(
        np.array([HOT], dtype=np.int64), np.ones((1, DIM), dtype=np.float32), right.version
    )
    assert ended(right, tmp_path, version=right.version) == [
        "the rows of partition 7, which came to version 25, are others at version 25 in the "
        "snapshot"
    ]
    assert [each.what for each in rows_are_their_pushes(right.history(), [], TABLE)] == [
        "the rows of partition 7, which came to version 25, are others in no snapshot"
    ]
