"""Checks of the clocks in a recorded history: no member is further ahead than ssp allows, and bsp's
iterations are separate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.history.lines import History, Line, Violation

_LARGEST_CLOCK = 2**62
"""Largest value of a server's clock."""


@dataclass
class _Clock:
    """A member's clock, as it reported it to one server."""

    clock: int
    origin: int | None = None
    """`clock` = origin + the iterations that it counts. None: it has not reported since it joined
    or rested."""
    rests: bool = False
    least: int = 0
    """Lower bound of the clock from the journal: the member's placement and its pushes."""

    def __post_init__(self) -> None:
        self.least = self.clock

    def at(self, finished: int) -> int:
        assert self.origin is not None
        return min(self.origin + finished, _LARGEST_CLOCK)

    def says(self, finished: int, place: int, slowest: int) -> None:
        if finished >= _LARGEST_CLOCK:
            self.origin, self.rests = None, True
            return
        if self.rests:
            self.clock = max(self.clock, slowest)
        if place or self.origin is None:
            self.origin = max(self.clock, place) - finished
        self.clock, self.rests = max(self.clock, self.at(finished)), False


def bound_is_kept(history: History, bound: int) -> Iterator[Violation]:
    """Checks each server separately. Only the members of the newest generation known to the server
    count. A member's progress is the number of iterations that it has reported to this server as
    finished. A joiner, or a member that has rested, begins at the clock of the slowest. No member
    waits for one that rests. After a restart the clocks are the same, except for progress that was
    reported without a push, and for the end of each member's last push."""
    said: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for line in history.of_workers("push", "pull", "clock"):
        said[line["member"]].add((line["clock"], line.fields.get("place", 0)))
    for server, lines in history.servers.items():
        clocks: dict[str, _Clock] = {}
        slowest = 0
        for number, line in enumerate(lines):
            match line["kind"]:
                case "applied" | "known" if line["sequence"] and line["member"] in clocks:
                    each = clocks[line["member"]]
                    if each.origin is not None:
                        each.least = max(each.least, each.at(line["clock"] - 1))
                case "clocks":
                    yield from _clocks_are_restored(server, line, clocks)
                    clocks = {
                        member: _Clock(clock=clock, origin=origin, rests=member in line["resting"])
                        for member, (clock, origin) in line["clocks"].items()
                    }
                    slowest = line["slowest"]
                case "members":
                    clocks = {
                        member: clocks.get(member) or _Clock(clock=slowest)
                        for member in line["members"]
                    }
                case "finished" if line["member"] in clocks:
                    if (line["clock"], line["place"]) not in said[line["member"]]:
                        what = (
                            f"server {server} counts {line['clock']} iterations of "
                            f"{line['member']}, which did not say so"
                        )
                        yield Violation(what, [line])
                    clocks[line["member"]].says(line["clock"], line["place"], slowest)
                case "turn":
                    lead = clocks[line["member"]].clock - slowest
                    if lead > bound:
                        what = (
                            f"the turn of {line['member']} came on server {server} {lead} ahead "
                            f"of the slowest, with a bound of {bound}"
                        )
                        slow = next(
                            (
                                m
                                for m, each in clocks.items()
                                if each.clock == slowest and not each.rests
                            ),
                            "nobody",
                        )
                        received = [
                            other
                            for other in lines[:number]
                            if other["kind"] == "finished" and other["member"] == slow
                        ]
                        yield Violation(what, [*received[-1:], line])
            slowest = min(
                (each.clock for each in clocks.values() if not each.rests), default=slowest
            )


def _clocks_are_restored(
    server: str, line: Line, clocks: Mapping[str, _Clock]
) -> Iterator[Violation]:
    """Checks the clocks of a restarted server. A member whose push of iteration n is in the journal
    has finished iteration n - 1, even if the server had not counted it."""
    for member, (clock, _) in line["clocks"].items():
        before = clocks.get(member)
        if before is not None and not before.least <= clock <= max(before.clock, before.least):
            yield Violation(
                f"server {server} came back with {member} at clock {clock}, where it had "
                f"{before.clock}",
                [line],
            )
    awaited = [
        clock for member, (clock, _) in line["clocks"].items() if member not in line["resting"]
    ]
    if any(clock < line["slowest"] for clock in awaited):
        yield Violation(
            f"server {server} came back with a member behind the slowest, at {line['slowest']}",
            [line],
        )


def iterations_are_apart(history: History) -> Iterator[Violation]:
    """Within the order of a partition's changes, each push is computed on the same version as the
    previous one, by another member; or on the version that the previous one produced, which begins
    the next iteration. Members number their iterations independently, so their numbers cannot be
    compared."""
    for partition, versions in history.changes.items():
        base, pushed = 0, dict[str, Line]()
        """The version on which this iteration's pushes are computed, and the change of each member
        in it."""
        for change in versions.values():
            sent = history.push_of(change) if change["sequence"] else None
            if sent is None:
                continue
            if sent["base"] == change["version"] - 1:
                base, pushed = sent["base"], {}
            elif sent["base"] != base:
                named = f"version {change['version']} of partition {partition}"
                yield Violation(
                    f"{named} is of a push on version {sent['base']}, where the iteration's are on "
                    f"{base}",
                    [sent, change],
                )
            if (other := pushed.setdefault(change["member"], change)) is not change:
                yield Violation(
                    f"{change['member']} pushed twice to partition {partition} in one iteration",
                    [other, change],
                )
