"""Finds stragglers: members that compute slowly or have a slow connection, and so slow the others
down while training continues.

In synchronous training the steps of all ranks take equally long, because each rank waits for the
slowest. The slowest rank is the one that waits least: its time outside of waits
(Progress.busy_time_s) is the longest. If a connection is slow, all ranks wait, including the rank
behind it. That rank is identified as the endpoint of most of the permanently busy connections
(Progress.busy_link).

If a step has fewer micro-batches than ranks, some ranks have no work, and no rank is reported as
slow.

Members that lease their batches (async_sgd) get batches in proportion to their speed, so a slow one
is a straggler only if the others wait for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, SendNotice
from shoal_coordinator.membership.model.pulse import Progress
from shoal_coordinator.membership.model.state import Generation, Straggler

_SHARE_OF_STEP: Final = 0.2
"""Minimum fraction by which steps would become shorter if a straggler were as fast as the other
ranks."""
_LEAST_S: Final = 0.05
_MOST_NAMED: Final = 4
_MOSTLY_WAITING: Final = 0.5
_SLOW_STEP_S: Final = 0.5
_SLOW_BYTES_PER_S: Final = 25e6
"""Speed below which a connection counts as slow: 200 Mbit/s. With two ranks, a comparison cannot
show whose connection is slow, so the absolute speed decides."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Step times reported in a rank's heartbeats."""

    rank: int
    member_id: str
    host: str
    progress: Progress

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


def find_stragglers(draft: Draft, generation: Generation) -> None:
    """Updates the stragglers of the newest generation, and announces the changes."""
    reports = [
        Report(rank=position, member_id=rank.member_id, host=rank.host, progress=pulse.progress)
        for position, rank in enumerate(generation.ranks)
        if (pulse := draft.pulse(rank.member_id)) is not None
        and pulse.silent_ms(draft.now.ms) <= draft.spec.unheard_ms
    ]
    found = (
        stragglers(reports, leased=draft.count_loaders() > 0)
        if len(reports) == len(generation.ranks)
        else {}
    )
    now_ms, policy, before = draft.now.ms, draft.policy, draft.stragglers
    kept = {
        member_id: one
        for member_id, one in before.items()
        if one.is_named
        and member_id in generation.rank_of
        and now_ms < one.seen_ms + policy.straggler_until_ms
    }
    for member_id, text in found.items():
        one = before.get(member_id) or Straggler(
            text=text, found_ms=now_ms, seen_ms=now_ms, is_named=False
        )
        named_now = not one.is_named and now_ms >= one.found_ms + policy.straggler_after_ms
        kept[member_id] = replace(
            one, text=text, seen_ms=now_ms, is_named=one.is_named or named_now
        )
        if named_now:
            draft.reasons.append(text)
            draft.effects.append(SendNotice(generation=generation, text=text))
            draft.records.append(
                Record(
                    kind="straggler_found",
                    generation=draft.number,
                    member_id=member_id,
                    attributes={"reason": text},
                )
            )
    if any(one.is_named for one in before.values()) and not any(
        one.is_named for one in kept.values()
    ):
        draft.effects.append(SendNotice(generation=generation, text=""))
    draft.stragglers = kept


def stragglers(reports: list[Report], *, leased: bool = False) -> dict[str, str]:
    """Returns a human-readable description of how each straggler slows the others down, by member
    id.

    `reports`: the reports of all ranks of a generation. `leased`: whether the ranks lease their
    batches.
    """
    if len(reports) < 2 or any(one.progress.step_time_s <= 0 for one in reports):
        return {}
    return _by_computing(reports, leased) or _by_connection(reports)


def _by_computing(reports: list[Report], leased: bool) -> dict[str, str]:
    if idle := _without_work(reports):
        names = ", ".join(one.name for one in idle[:_MOST_NAMED])
        more = f" and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
        text = (
            f"{names}{more} {'has' if len(idle) == 1 else 'have'} no work: a step has fewer "
            "micro-batches than there are ranks; choose smaller micro-batches (in a Trainer, a "
            "smaller batch and more accumulation), a larger global batch, or fewer workers"
        )
        return {idle[0].member_id: text}
    found = {}
    for one in reports:
        others = [other for other in reports if other is not one]
        if leased and _waiting_share(others) < _SHARE_OF_STEP:
            continue
        others_s = median(other.progress.busy_time_s for other in others)
        lost_s = one.progress.busy_time_s - others_s
        if lost_s > max(_LEAST_S, _SHARE_OF_STEP * one.progress.step_time_s):
            text = (
                f"the others are waiting for {one.name}: it works for "
                f"{_seconds(one.progress.busy_time_s)} of each step, the others for "
                f"{_seconds(others_s)}"
            )
            if not one.progress.share and not leased:
                text += (
                    "; if a step cannot be divided evenly, some ranks get more of it; if this one "
                    "is always slower, see docs/guides/unequal-machines.md"
                )
            found[one.member_id] = text
    return found


def _without_work(reports: list[Report]) -> list[Report]:
    """Returns the ranks that get no micro-batch in a step although others do."""
    working = [one.progress.busy_time_s for one in reports if one.progress.share > 0]
    if not working:
        return []
    return [
        one
        for one in reports
        if one.progress.share == 0 and one.progress.busy_time_s < median(working) / 2
    ]


def _by_connection(reports: list[Report]) -> dict[str, str]:
    step_s = median(one.progress.step_time_s for one in reports)
    if step_s < _SLOW_STEP_S or _waiting_share(reports) < _MOSTLY_WAITING:
        return {}
    behind, how = behind_connection(reports)
    return {one.member_id: f"{how} in steps of {_seconds(step_s)}" for one in behind}


def _waiting_share(reports: list[Report]) -> float:
    """Returns the fraction of a step that a typical rank (the median) waits for its peers."""
    return median(1 - one.progress.busy_time_s / one.progress.step_time_s for one in reports)


def behind_connection(reports: list[Report]) -> tuple[list[Report], str]:
    """Identifies the permanently busy connection that slows down a generation in which all ranks
    are waiting. Returns the members at its slow end (if there are only two ranks, both members),
    and a human-readable description. If the connection cannot be identified, the list and the
    description are empty."""
    links = [
        (one.rank, *one.progress.busy_link) for one in reports if one.progress.busy_link is not None
    ]
    if len(links) < 2:
        return [], ""
    ends = Counter(end for source, target, _ in links for end in {source, target})
    (first, count), *rest = ends.most_common()
    rate = median(rate for _, _, rate in links)
    where = f"{rate / 1e6:.2g} MB/s and is always busy"
    if len(reports) > 2 and all(others < count for _, others in rest):
        behind = [one for one in reports if one.rank == first]
        return (
            behind,
            f"the others are waiting for {behind[0].name}: the connection to it transfers {where}"
            if behind
            else "",
        )
    if len(reports) == 2 and rate < _SLOW_BYTES_PER_S:
        return (
            reports,
            f"{reports[0].name} and {reports[1].name} are waiting for the connection between "
            f"them: it transfers {where}",
        )
    return [], ""


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.0f} ms"
