"""The check of each promise finds a violation that was inserted by hand into a correct history."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shoal_common.formats.wire import checksum

from tests.history.checking import (
    applied_once,
    changes_are_one_history,
    none_lost,
    optimizer_is_adam,
    samples_count_once,
    versions_are_monotonic,
)
from tests.history.clock_checks import bound_is_kept, iterations_are_apart
from tests.history.lines import History, Line, Violation

ADAM = {"lr": 0.1}
LENGTHS = (3, 2)
BOUND = 1
Fields = dict[str, Any]


def digest(tensor: torch.Tensor) -> str:
    return f"{checksum(tensor.numpy()):016x}"


def hexed(tensor: torch.Tensor) -> str:
    return bytes(tensor.numpy()).hex()


class Right:
    """A correct history, into which tests insert violations: a server and two members, who push in
    turn. Each line is one time unit later than the line before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records = directory / "records"
        self.records.mkdir()
        self.now = 0
        self.calls = 0
        self.server: list[Fields] = []
        self.backup: list[Fields] = []
        """Lines of another server, which takes over later."""
        self.workers: dict[str, list[Fields]] = {"a": [], "b": []}
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(sum(LENGTHS), generator=generator)
        self.parameters = [torch.nn.Parameter(part.clone()) for part in values.split(LENGTHS)]
        self.optimizer = torch.optim.Adam(self.parameters, fused=True, **ADAM)
        self.serve("starts", pid=1, address="s:1")
        self.serve("clocks", slowest=0, clocks={}, resting=[])
        self.serve("members", generation=1, members=["a", "b"])
        self.work("a", "values", call=self.call(), partition=0, values=hexed(values))
        self.change(member="", sequence=0, batch=0, clock=0, gradient=digest(values))
        for member in "ab":
            self.pull(member, clock=0)
        for iteration in range(1, 4):
            for place, member in enumerate("ab"):
                self.push(
                    member,
                    iteration,
                    batch=2 * iteration + place,
                    gradient=torch.randn(sum(LENGTHS), generator=generator),
                )
                self.pull(member, clock=iteration)

    def moment(self) -> int:
        self.now += 1
        return self.now

    def call(self) -> int:
        self.calls += 1
        return self.calls

    def serve(self, kind: str, **fields: Any) -> Fields:
        self.server.append({"kind": kind, "t": self.moment(), "of": "server", **fields})
        return self.server[-1]

    def follow(self, kind: str, **fields: Any) -> Fields:
        """Adds a line of the backup."""
        self.backup.append({**fields, "kind": kind, "t": self.moment(), "of": "backup"})
        return self.backup[-1]

    def take_over(self) -> None:
        """Makes the backup, which has all changes but the last, the primary."""
        self.serve("placed", span=0, index=0, epoch=1, follows=False, serves=True)
        self.follow("starts", pid=3, address="s:2")
        self.follow("placed", span=1, index=0, epoch=1, follows=True, serves=False)
        for line in [line for line in self.server if line["kind"] == "applied"][:-1]:
            self.follow(**{**line, "span": 2, "again": True})
        self.follow("placed", span=2, index=0, epoch=2, follows=False, serves=True)

    def come_back(self, *, follows: bool) -> None:
        """Restarts the first server, which recovers its last change and is then assigned
        its role."""
        self.serve("starts", pid=4, address="s:1")
        self.serve(**{**self.last("applied"), "again": True})
        self.serve("placed", span=0, index=0, epoch=3, follows=follows, serves=not follows)

    def work(self, of: str, kind: str, /, **fields: Any) -> Fields:
        self.workers[of].append({"kind": kind, "t": self.moment(), "of": of, **fields})
        return self.workers[of][-1]

    def joined(self) -> torch.Tensor:
        return torch.cat([parameter.detach() for parameter in self.parameters])

    @property
    def version(self) -> int:
        return max(
            (line["version"] for line in self.server if line["kind"] == "applied"), default=0
        )

    def change(self, **fields: Any) -> None:
        self.serve(
            "applied",
            partition=0,
            version=self.version + 1,
            digest=digest(self.joined()),
            again=False,
            **fields,
        )

    def pull(self, member: str, *, clock: int) -> None:
        call = self.call()
        self.work(member, "pull", call=call, member=member, clock=clock, at="s:1")
        self.serve("finished", member=member, clock=clock, place=0)
        self.serve("turn", member=member)
        answer = {
            "partition": 0,
            "version": self.version,
            "unchanged": False,
            "digest": digest(self.joined()),
        }
        self.work(member, "pulled", call=call, answers=[answer])

    def push(self, member: str, sequence: int, *, batch: int, gradient: torch.Tensor) -> None:
        call, named = self.call(), {"partition": 0, "sequence": sequence, "batch": batch}
        more = {
            "base": self.version,
            "clock": sequence,
            "absent": [],
            "member": member,
            "at": "s:1",
        }
        self.work(member, "push", call=call, **named, **more, gradient=hexed(gradient))
        for parameter, part in zip(self.parameters, gradient.split(LENGTHS), strict=True):
            parameter.grad = part
        self.optimizer.step()
        self.change(
            member=member, sequence=sequence, batch=batch, clock=sequence, gradient=digest(gradient)
        )
        self.work(
            member,
            "pushed",
            call=call,
            answers=[{**named, "version": self.version, "duplicate": False, "known": False}],
        )
        self.record(member, "dealt", step=batch - 2, first=batch - 2, samples=[batch - 2])
        self.record(member, "finished", step=batch - 2, known=False)

    def record(self, member: str, kind: str, **fields: Any) -> None:
        common = {"loader": "train", "generation": 1, "epoch": 0}
        more = (
            {"rank": 0, "index": 0, "begin": 0, "expected": 6, "dataset": 6, "drawn": False}
            if kind == "dealt"
            else {}
        )
        with (self.records / f"{member}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **common, **more, **fields}) + "\n")

    def snapshot(self) -> Path:
        path = self.directory / "snapshot.safetensors"
        state = {
            name: torch.cat([self.optimizer.state[p][name] for p in self.parameters])
            for name in ("exp_avg", "exp_avg_sq")
        }
        tensors = {f"0:state:0:{name}": tensor for name, tensor in state.items()}
        tensors |= {
            "0:values": self.joined(),
            "0:state:0:step": torch.tensor(float(self.version - 1)),
        }
        layout = {"partitions": [[0, "float32", [["t", 0, LENGTHS[0]], ["u", 0, LENGTHS[1]]]]]}
        entry = {"partition_id": 0, "version": self.version, "runs": [[0, 2]]}
        save_file(
            tensors,
            path,
            metadata={"shoal": json.dumps({"state": {"layout": layout}, "partitions": [entry]})},
        )
        return path

    def history(self) -> History:
        return History(
            servers={
                name: list(map(Line, lines))
                for name, lines in {"server": self.server, "backup": self.backup}.items()
            },
            workers={
                member: [Line(fields) for fields in lines] for member, lines in self.workers.items()
            },
        )

    def last(self, kind: str, member: str = "") -> Fields:
        """Returns the last line of a kind, from the server or from a member."""
        return [
            line
            for line in (self.workers[member] if member else self.server)
            if line["kind"] == kind
        ][-1]


@pytest.fixture
def right(tmp_path: Path) -> Right:
    return Right(tmp_path)


CHECKS: dict[str, Callable[[Right, History], Iterator[Violation]]] = {
    "one history": lambda right, history: changes_are_one_history(history),
    "applied once": lambda right, history: applied_once(history),
    "none lost": lambda right, history: none_lost(history),
    "monotonic": lambda right, history: versions_are_monotonic(history),
    "Adam": lambda right, history: optimizer_is_adam(history, [right.snapshot()], ADAM),
    "bound": lambda right, history: bound_is_kept(history, BOUND),
    "samples": lambda right, history: samples_count_once(history, right.records, batch_size=1),
}


def found(right: Right, check: str) -> list[str]:
    return [violation.what for violation in CHECKS[check](right, right.history())]


@pytest.mark.parametrize("check", CHECKS)
def test_correct_history_breaks_no_promise(right: Right, check: str) -> None:
    assert found(right, check) == []


def test_acknowledged_push_that_was_not_applied_is_reported_lost(right: Right) -> None:
    right.server.remove(right.last("applied"))
    assert found(right, "none lost") == [
        "push 3 of b (batch 7) to partition 0 was acknowledged, and is lost"
    ]


def test_push_mistaken_for_another_one_is_reported_lost(right: Right) -> None:
    """A push of another batch had the same number, so the server regarded this one as known."""
    right.last("applied")["batch"] = 99
    assert found(right, "none lost") == [
        "push 3 of b (batch 7) to partition 0 was acknowledged, and is lost"
    ]


def test_acknowledgement_that_reached_no_worker_must_be_true_too(right: Right) -> None:
    known = {"partition": 0, "version": right.version, "member": "b", "clock": 4, "batch": 9}
    right.serve("known", **known, sequence=4)
    assert found(right, "none lost") == [
        "push 4 of b (batch 9) to partition 0 was acknowledged, and is lost"
    ]


def test_push_recognized_by_its_batch_is_not_lost(right: Right) -> None:
    answer = right.last("pushed", "b")["answers"][0]
    again = {**answer, "sequence": 4, "batch": 2, "duplicate": True, "known": True}
    right.work(
        "b",
        "push",
        call=99,
        member="b",
        partition=0,
        sequence=4,
        batch=2,
        base=1,
        clock=4,
        absent=[],
        gradient="",
        at="s:1",
    )
    right.work("b", "pushed", call=99, answers=[again])
    assert found(right, "none lost") == []
    again["known"] = again["duplicate"] = False
    assert found(right, "none lost") == [
        "push 4 of b (batch 2) to partition 0 was acknowledged, and is lost"
    ]


def test_an_acknowledgement_of_another_version_is_found(right: Right) -> None:
    right.last("pushed", "a")["answers"][0]["version"] += 1
    assert found(right, "none lost") == [
        "push 3 of a (batch 6) to partition 0 was acknowledged at version 7, and led to 6"
    ]


def test_push_applied_twice_is_found(right: Right) -> None:
    again = copy.deepcopy(right.last("applied"))
    right.serve(**{**again, "version": right.version + 1})
    assert found(right, "applied once") == [
        "push 3 of b was applied twice to partition 0",
        "batch 7 was applied twice to partition 0",
    ]


def test_batch_pushed_by_two_members_is_found(right: Right) -> None:
    right.last("applied")["batch"] = right.last("push", "b")["batch"] = 2
    assert found(right, "applied once") == ["batch 2 was applied twice to partition 0"]


def test_pushes_applied_out_of_order_are_found(right: Right) -> None:
    applied = [line for line in right.server if line["kind"] == "applied" and line["member"] == "a"]
    applied[1]["version"], applied[2]["version"] = applied[2]["version"], applied[1]["version"]
    assert found(right, "applied once") == [
        "push 2 of a was applied to partition 0 after a later one"
    ]


def test_gradient_that_no_worker_sent_is_found(right: Right) -> None:
    right.last("push", "b")["gradient"] = hexed(torch.ones(sum(LENGTHS)))
    assert found(right, "applied once") == [
        "what was applied to partition 0 as push 3 of b was never sent"
    ]


def test_recovery_that_makes_a_different_change_is_found(right: Right) -> None:
    right.serve(**{**right.last("applied"), "again": True})
    assert found(right, "one history") == []
    right.serve(**{**right.last("applied"), "again": True, "digest": "0"})
    assert found(right, "one history") == [
        "version 7 of partition 0 is not what it was when it was made first"
    ]


def test_version_made_a_second_time_after_a_restart_is_found(right: Right) -> None:
    right.serve(**{**right.last("applied"), "member": "a", "sequence": 4, "batch": 8})
    assert found(right, "one history") == [
        "version 7 of partition 0 is not what it was when it was made first"
    ]


def test_a_snapshot_with_other_values_is_found(right: Right) -> None:
    right.serve("restored", partition=0, version=7, digest=right.last("applied")["digest"])
    assert found(right, "one history") == []
    right.serve("restored", partition=0, version=6, digest=right.last("applied")["digest"])
    right.serve("restored", partition=0, version=8, digest="0")
    assert found(right, "one history") == [
        "version 6 of partition 0 is not what it was when it was made first",
        "partition 0 came out of a snapshot at version 8, to which no change has led",
    ]


def test_version_without_a_change_that_led_to_it_is_found(right: Right) -> None:
    right.last("applied")["version"] = 9
    assert found(right, "one history") == [
        "partition 0 came to version 9 without a change to version 7"
    ]


def test_changes_only_on_a_former_primary_are_dropped_once_it_is_a_backup(right: Right) -> None:
    right.take_over()
    last = right.last("applied")
    right.server.remove(last)  # it was killed before it applied the change in its journal
    right.follow(**{**last, "span": 2, "member": "a", "sequence": 4, "batch": 8, "digest": "0"})
    right.serve("starts", pid=4, address="s:1")
    right.serve(**{**last, "again": True})
    right.serve("placed", span=0, index=0, epoch=2, follows=True, serves=False)
    assert found(right, "one history") == []
    assert found(right, "none lost") == [
        "push 3 of b (batch 7) to partition 0 was acknowledged, and is lost"
    ]
    right.last("placed").update(follows=False, serves=True)
    assert found(right, "one history") == [
        "version 7 of partition 0 is not what it was when it was made first"
    ]


def test_backup_that_recovers_different_changes_is_found(
    right: Right,
) -> None:
    right.take_over()
    right.come_back(follows=True)
    assert found(right, "one history") == []
    right.last("applied")["digest"] = "0"
    assert found(right, "one history") == [
        "version 7 of partition 0 is not what it was when it was made first"
    ]


def test_backup_that_makes_a_different_change_than_its_primary_is_found(right: Right) -> None:
    right.take_over()
    assert found(right, "one history") == []
    right.backup[-2]["digest"] = "0"
    assert found(right, "one history") == [
        "version 6 of partition 0 is not what it was when it was made first"
    ]


def test_change_missing_on_the_next_primary_is_found(right: Right) -> None:
    right.take_over()
    right.follow(**{**right.last("applied"), "span": 2, "member": "a", "sequence": 4, "batch": 8})
    assert found(right, "one history") == [
        "version 7 of partition 0 is not what it was when it was made first"
    ]


def test_change_made_by_two_primaries_is_found(right: Right) -> None:
    right.take_over()
    right.follow(**{**right.last("applied"), "span": 2})
    assert found(right, "one history") == [
        "server and backup both made version 7 of partition 0 as primaries"
    ]


def test_replaced_primary_may_report_older_versions_until_it_knows(
    right: Right,
) -> None:
    right.take_over()
    older = copy.deepcopy(right.last("pulled", "a")["answers"])
    right.work("b", "pull", call=99, member="b", clock=3, at="s:1")
    right.work("b", "pulled", call=99, answers=older)
    assert found(right, "monotonic") == []
    right.work("b", "pull", call=100, member="b", clock=3, at="s:2")
    right.work("b", "pulled", call=100, answers=older)
    assert found(right, "monotonic") == [
        "version 6 of partition 0 was told after version 7 had been"
    ]


def test_primary_that_knows_it_was_replaced_reports_nothing(right: Right) -> None:
    right.take_over()
    older = copy.deepcopy(right.last("pulled", "a")["answers"])
    right.come_back(follows=True)
    right.work("b", "pull", call=99, member="b", clock=3, at="s:1")
    right.work("b", "pulled", call=99, answers=older)
    assert found(right, "monotonic") == [
        "version 6 of partition 0 was told after version 7 had been"
    ]


def test_final_owner_of_a_place_is_its_last_primary(right: Right) -> None:
    right.take_over()
    assert (right.history().primaries(), right.history().promotions) == (["backup"], 1)
    right.come_back(follows=True)
    assert (right.history().primaries(), right.history().promotions) == (["backup"], 1)
    right.last("placed").update(follows=False, serves=True)
    assert (right.history().primaries(), right.history().promotions) == (["server"], 2)


def test_values_that_do_not_match_their_version_are_found(right: Right) -> None:
    right.last("pulled", "a")["answers"][0]["digest"] = "0"
    assert found(right, "monotonic") == [
        "a pull gave version 6 of partition 0 with other values than the server had"
    ]


def test_a_version_that_no_server_had_is_found(right: Right) -> None:
    right.last("pulled", "b")["answers"][0]["version"] = 8
    assert found(right, "monotonic") == [
        "a pull gave version 8 of partition 0, which no server has had"
    ]


def test_version_that_goes_back_is_found_for_any_reader(right: Right) -> None:
    older = copy.deepcopy(right.last("pulled", "a")["answers"])
    right.work("b", "pull", call=99, member="b", clock=3, at="s:1")
    right.work("b", "pulled", call=99, answers=older)
    assert found(right, "monotonic") == [
        "version 6 of partition 0 was told after version 7 had been"
    ]


def test_older_version_requested_before_the_newer_one_was_reported_is_accepted(
    right: Right,
) -> None:
    older = copy.deepcopy(right.last("pulled", "a")["answers"])
    right.workers["b"].append(
        {
            "kind": "pull",
            "t": right.last("pulled", "a")["t"],
            "of": "b",
            "call": 99,
            "member": "b",
            "clock": 3,
            "at": "s:1",
        }
    )
    right.work("b", "pulled", call=99, answers=older)
    assert found(right, "monotonic") == []


def test_a_change_that_adam_does_not_make_is_found(right: Right) -> None:
    right.last("applied")["digest"] = "0"
    assert found(right, "Adam") == ["version 7 of partition 0 is not what Adam makes of its pushes"]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_adams_are_found(right: Right, name: str) -> None:
    right.optimizer.state[right.parameters[1]][name][0] += 1e-6
    assert found(right, "Adam") == [
        f"{name} of partition 0 differ in the snapshot from what Adam has in one process"
    ]


def test_snapshot_without_the_last_change_is_found(right: Right) -> None:
    right.last("applied")["version"] += 1
    path = right.snapshot()
    right.last("applied")["version"] -= 1
    assert [each.what for each in optimizer_is_adam(right.history(), [path], ADAM)] == [
        "partition 0 came to version 7, and ended at 8"
    ]


def test_values_that_no_worker_sent_are_found(right: Right) -> None:
    right.workers["a"] = [line for line in right.workers["a"] if line["kind"] != "values"]
    assert found(right, "Adam") == ["partition 0 began with values that no worker gave"]


def test_a_turn_that_came_too_early_is_found(right: Right) -> None:
    for clock in (4, 5):
        right.pull("a", clock=clock)
    assert found(right, "bound") == [
        "the turn of a came on server server 2 ahead of the slowest, with a bound of 1"
    ]


def test_joiner_starts_at_the_slowest_clock_and_departed_members_are_not_awaited(
    right: Right,
) -> None:
    right.serve("members", generation=2, members=["a", "c"])
    right.workers["c"] = []
    for clock in (4, 5):
        right.pull("a", clock=clock)
    right.pull("c", clock=70)
    right.pull("c", clock=71)
    assert found(right, "bound") == [
        "the turn of a came on server server 2 ahead of the slowest, with a bound of 1"
    ]
    right.serve("members", generation=3, members=["a"])
    right.pull("a", clock=90)
    assert len(found(right, "bound")) == 1


def test_resting_member_is_not_awaited_and_returns_at_the_slowest_clock(
    right: Right,
) -> None:
    def says(clock: int, *, place: int = 0) -> None:
        right.work("b", "clock", member="b", clock=clock, place=place)
        right.serve("finished", member="b", clock=clock, place=place)

    says(2**63 - 1)
    for clock in range(4, 9):
        right.pull("a", clock=clock)
    assert found(right, "bound") == []
    right.serve("starts", pid=2, address="s:1")
    right.serve("clocks", slowest=8, clocks={"a": [8, 0], "b": [3, None]}, resting=["b"])
    says(3)  # where a is, at 8
    right.pull("a", clock=9)
    says(3, place=10)
    right.pull("a", clock=11)
    assert found(right, "bound") == []
    right.pull("a", clock=12)
    assert found(right, "bound") == [
        "the turn of a came on server server 2 ahead of the slowest, with a bound of 1"
    ]


def test_restart_that_forgets_clocks_is_found(right: Right) -> None:
    right.serve("starts", pid=2, address="s:1")
    right.serve("clocks", slowest=2, clocks={"a": [2, 0], "b": [3, 0]}, resting=[])
    assert found(right, "bound") == []
    right.serve("clocks", slowest=0, clocks={"a": [0, None], "b": [3, 0]}, resting=[])
    assert found(right, "bound") == ["server server came back with a at clock 0, where it had 2"]
    right.serve("clocks", slowest=3, clocks={"a": [3, 0], "b": [3, 0]}, resting=[])
    assert "server server came back with a at clock 3, where it had 0" in found(right, "bound")
    right.serve("clocks", slowest=4, clocks={"a": [3, 0], "b": [3, 0]}, resting=[])
    assert "server server came back with a member behind the slowest, at 4" in found(right, "bound")


def test_restart_counts_the_iteration_of_a_push_known_only_from_the_journal(
    right: Right,
) -> None:
    right.serve("starts", pid=2, address="s:1")
    right.serve(
        **{
            **right.last("applied"),
            "version": right.version + 1,
            "member": "a",
            "sequence": 4,
            "clock": 5,
            "again": True,
        }
    )
    right.serve("clocks", slowest=3, clocks={"a": [4, 0], "b": [3, 0]}, resting=[])
    assert found(right, "bound") == []


def test_iterations_that_no_member_reported_are_found(right: Right) -> None:
    right.serve("finished", member="b", clock=4, place=0)
    assert found(right, "bound") == ["server server counts 4 iterations of b, which did not say so"]


def test_pushes_of_one_iteration_based_on_different_values_are_found(right: Right) -> None:
    """The history is correct for bsp with one member per iteration. Here an iteration has both
    members, except one in the middle."""

    def found_apart() -> list[str]:
        return [each.what for each in iterations_are_apart(right.history())]

    def base(member: str, number: int, version: int) -> None:
        [line for line in right.workers[member] if line["kind"] == "push"][number - 1]["base"] = (
            version
        )

    assert found_apart() == []
    for number in (1, 2, 3):
        base("b", number, 2 * number - 1)
    assert found_apart() == []
    base("b", 2, 2)
    assert found_apart() == [
        "version 5 of partition 0 is of a push on version 2, where the iteration's are on 3"
    ]
    base("b", 2, 3)
    base("a", 3, 3)
    assert "a pushed twice to partition 0 in one iteration" in found_apart()


def test_sample_counted_twice_or_never_is_found(right: Right) -> None:
    right.record("b", "dealt", step=0, first=0, samples=[0])
    right.record("b", "finished", step=0, known=False)
    assert found(right, "samples") == ["epoch 0: 0 samples lost (), 1 repeated (0,)"]


def test_batch_missing_on_one_partition_is_found(right: Right) -> None:
    right.server.remove(right.last("applied"))
    assert found(right, "samples") == [
        "6 batches were dealt and finished, partition 0 has 5 of them"
    ]


def test_torn_last_line_is_skipped_and_server_lifetimes_are_chained(
    tmp_path: Path,
) -> None:
    lives = {"server-9": 20, "server-10": 10}
    for name, begun in lives.items():
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"kind": "starts", "t": begun, "of": "server", "pid": 1}) + '\n{"kind": "app'
        )
    assert [line["t"] for line in History.read(tmp_path).servers["server"]] == [10, 20]
