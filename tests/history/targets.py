"""Targets of a campaign's faults: a process and its successors, and the failpoints at which each
kind may be killed. faults.py decides which faults occur and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.zygote.children import Child

SERVER_FAILPOINTS = {
    "journal.before_write": 100,
    "journal.durable": 100,
    "journal.effect_made": 200,
    "journal.file_begun": 2,
    "snapshot.written": 2,
    "snapshot.renamed": 2,
    "snapshot.spare_kept": 2,
    "snapshot.journal_shortened": 2,
    "pull.halfway": 200,
    "recovery.begun": 1,
    "recovery.record_made": 100,
    "recovery.done": 1,
}
"""Failpoint -> the latest hit at which a process is killed there."""
BACKUP_FAILPOINTS = {
    "backup.before_note": 2,
    "backup.holds": 2,
    "backup.cleared": 2,
    "backup.copied": 2,
    "backup.record_made": 100,
    "backup.promoted": 1,
}
"""Failpoints of servers that are backups or have backups."""
MOVE_FAILPOINTS = {
    "move.frozen": 2,
    "move.taken": 2,
    "move.noted": 2,
    "move.reported": 2,
    "move.activated": 2,
    "move.dropped": 2,
}
"""Failpoints of servers that exchange partitions."""
WORKER_FAILPOINTS = {"exchange.server_answered": 100, "exchange.done": 50}
COORDINATOR_FAILPOINTS = {"decision.before_write": 30, "decision.written": 30}


@dataclass(kw_only=True, eq=False)
class Target:
    """A process that faults hit, and its successors."""

    name: str
    start: Callable[[str], Child]
    """Starts a process with the argument as SHOAL_FAILPOINTS."""
    failpoints: dict[str, int]
    child: Child | None = None
    """None: it is waiting to be restarted."""
    armed: str = ""
    """The failpoint at which this process kills itself."""
    doomed: str = ""
    """Fault that ends the process."""
    stopped: bool = False
    leaves: bool = False
    """True if it is being drained; it is not restarted after it has exited successfully."""

    @property
    def undisturbed(self) -> bool:
        """True if it runs and no fault affects it."""
        return (
            self.child is not None
            and not self.child.ended.is_set()
            and not self.doomed
            and not self.stopped
        )

    @property
    def kind(self) -> str:
        """coordinator, server or worker."""
        return self.name.partition("-")[0]

    @property
    def waits_for_another_run(self) -> bool:
        """True for a server that waits because it was started after the end of the run of its
        data, according to its log (docs/explanation/membership.md#runs)."""
        return self.kind == "server" and self.child is not None and "RUN_ENDED" in self.child.said()
