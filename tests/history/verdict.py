"""The final report of a campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.history.lines import History, Violation


@dataclass(kw_only=True)
class Verdict:
    """The actions, counts and violations of a campaign."""

    mode: str
    seed: int
    faults: Counter[str]
    counts: dict[str, int] = field(default_factory=dict)
    broken: dict[str, list[Violation]] = field(default_factory=dict)
    """Promise -> its violations."""
    held: list[str] = field(default_factory=list)
    """Promises that were checked and kept."""
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{times} {kind}" for kind, times in sorted(self.faults.items()))
        lines = [
            f"{self.mode}, seed {self.seed}: {self.faults.total()} faults in {self.seconds:.0f} s "
            f"({kinds})"
        ]
        lines.append("  " + ", ".join(f"{number} {what}" for what, number in self.counts.items()))
        lines += [f"  kept: {promise}" for promise in self.held]
        for promise, violations in self.broken.items():
            lines.append(f"  BROKEN: {promise} ({len(violations)} times)")
            lines += [f"    {violation}" for violation in violations[:3]]
        return "\n".join(lines)


def counts(history: History) -> dict[str, int]:
    """Returns the figures of a history's size. Pushes are counted by partition."""
    answers = [answer for line in history.of_workers("pushed") for answer in line["answers"]]
    return {
        "pushes acknowledged": len(answers),
        "applied": sum(len(versions) - 1 for versions in history.changes.values()),
        "answered as known": sum(1 for _ in history.of_servers("known")),
        "partitions pulled": sum(1 for _ in history.of_servers("sent")),
        "lookups of rows": sum(bool(seen.ids) for seen in history.seen),
        "made again by recoveries and backups": sum(
            line["again"] for line in history.of_servers("applied")
        ),
        "void": sum(1 for _ in history.of_servers("applied", "restored")) - len(history.valid),
        "backups made primaries": history.promotions,
    }
