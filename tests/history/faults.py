"""The faults of a campaign: which fault comes next, which process it hits, and when a process that
has ended is started again.

The seed determines the faults, their targets and their times. The state in which they find the
processes is left to chance. At least one worker is always left alone, so that the job never lacks
workers.

The campaign decides how long faults continue and what is reported at the end.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Self

from shoal_common.exit_status import EVICTED

from tests.history.agenda import Agenda
from tests.history.cluster import LEASE_MS, MOST_SERVERS, Cluster
from tests.history.lines import Violation
from tests.history.modes import Mode
from tests.history.targets import BACKUP_FAILPOINTS, MOVE_FAILPOINTS, Target

_LONGEST_ABSENCE_S = 0.6
"""Delay between the end of a process and the start of its successor; sometimes
`_LONG_ABSENCE_S`."""
_LONG_ABSENCE_S = 3.0
_LONG_ABSENCES = 0.15


class Faults:
    """Faults, used by the thread that creates them. While it is entered, further threads drain
    servers."""

    def __init__(
        self,
        cluster: Cluster,
        mode: Mode,
        chance: random.Random,
        *,
        unexpected: Callable[[Violation], None],
    ) -> None:
        """`unexpected`: called with a violation when a process has ended by itself."""
        self._cluster = cluster
        self._mode = mode
        self._chance = chance
        self._unexpected = unexpected
        self._agenda = Agenda()
        self._over = threading.Event()
        self._drains: list[threading.Thread] = []
        self._ending = False
        self.done: Counter[str] = Counter()
        """Number of faults of each kind."""
        self.restarts = 0
        self.evicted = 0
        self.drained = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._drains:
            thread.join()

    # ------------------------------------------------------------------------ what they bring about

    @property
    def are_pending(self) -> bool:
        """True while a process still has to be restarted or resumed."""
        return bool(self._agenda)

    def end(self) -> None:
        """Stops killing restarted processes from now on."""
        self._ending = True

    def attend(self) -> None:
        """Runs what is due, and looks for processes that have exited."""
        self.do_what_is_due()
        for target in self._cluster.targets:
            if target.child is not None and target.child.ended.is_set():
                self.has_ended(target)

    def do_what_is_due(self) -> None:
        """Restarts and resumes the processes that are due."""
        self._agenda.do_what_is_due()

    def has_ended(self, target: Target) -> None:
        """Handles the end of a target's process; a successor starts after a delay."""
        child = target.child
        assert child is not None
        if child.status == -signal.SIGKILL and (target.doomed == "killed" or target.armed):
            if target.doomed != "killed":
                self.done[f"{target.kind} killed at a failpoint"] += 1
        elif target in self._cluster.workers and child.status == EVICTED:
            self.evicted += 1
        elif target.leaves and child.status == 0:
            self._cluster.servers.remove(target)
            self.drained += 1
            return
        elif not (target.doomed == "told to end" and child.status in (0, -signal.SIGTERM)):
            # it may have only just started
            said = child.said()[-3000:]
            self._unexpected(
                Violation(
                    f"{target.name} ended by itself with status {child.status}; it said:\n{said}"
                )
            )
        target.child, target.armed, target.doomed, target.stopped = None, "", "", False
        longest = _LONG_ABSENCE_S if self._chance.random() < _LONG_ABSENCES else _LONGEST_ABSENCE_S
        self._agenda.later(self._chance.uniform(0, longest), lambda: self._start_again(target))

    def _start_again(self, target: Target) -> None:
        if self._ending or self._chance.random() < 0.6:
            target.armed = ""
        else:
            special = (
                BACKUP_FAILPOINTS
                if self._mode.backups
                else MOVE_FAILPOINTS
                if self._mode.moves
                else {}
            )
            between = special and target in self._cluster.servers and self._chance.random() < 0.5
            name = self._chance.choice(sorted(special if between else target.failpoints))
            target.armed = f"{name}@{self._chance.randint(1, target.failpoints[name])}=kill"
        target.child = target.start(target.armed)
        self.restarts += 1
        if (
            self._mode.backups
            and target in self._cluster.servers
            and not self._ending
            and self._chance.random() < 0.3
        ):
            # While it is still synchronizing, or has not received its role.
            self._agenda.later(
                self._chance.uniform(0, 1.5),
                lambda: self._kill(self._chance.choice(self._cluster.servers)),
            )

    # ------------------------------------------------------------------------------------- striking

    def strike(self) -> None:
        """Causes one random fault; has no effect if its target is already disturbed."""
        cluster, choice = self._cluster, self._chance.choice
        kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (4, lambda: self._kill(choice(cluster.servers))),
            (3, lambda: self._kill(choice(cluster.workers))),
            (1, lambda: self._kill(cluster.coordinator)),
            (2, lambda: self._stop(choice(cluster.servers))),
            (2, lambda: self._stop(choice(cluster.workers))),
            (1, lambda: self._stop(cluster.coordinator)),
            (
                2,
                lambda: self._ask_to_end(
                    choice([*cluster.workers, *cluster.servers, cluster.coordinator])
                ),
            ),
            (4, self._cut),
            (2, self._drop),
            (1, self._restart_redis),
            (2 * (self._mode.backups or self._mode.moves), self._kill_two),
            (8 * self._mode.moves, self._join_or_leave),
            (2 * self._mode.backups, self._kill_with_coordinator),
        )
        strike = self._chance.choices([each for _, each in kinds], [weight for weight, _ in kinds])[
            0
        ]
        strike()

    def _may_disturb(self, target: Target) -> bool:
        workers = self._cluster.workers
        others = [each for each in workers if each is not target and each.undisturbed]
        return target.undisturbed and (target not in workers or bool(others))

    def _kill(self, target: Target) -> None:
        if self._may_disturb(target):
            assert target.child is not None
            target.doomed = "killed"
            target.child.kill()
            self.done[f"{target.kind} killed"] += 1

    def _kill_two(self) -> None:
        """Kills a primary and its backup, or a server of each of two places."""
        for target in self._chance.sample(self._cluster.servers, 2):
            self._kill(target)

    def _kill_with_coordinator(self) -> None:
        """Kills a server together with the coordinator, so that the server may return before it can
        learn its role."""
        self._kill(self._cluster.coordinator)
        self._kill(self._chance.choice(self._cluster.servers))

    def _join_or_leave(self) -> None:
        """Adds a server, or drains one."""
        servers = self._cluster.servers
        if len(servers) < MOST_SERVERS:
            target = self._cluster.add_server()
            armed = (
                f"{self._chance.choice(sorted(MOVE_FAILPOINTS))}@1=kill"
                if self._chance.random() < 0.3
                else ""
            )
            target.armed, target.child = armed, target.start(armed)
            self.done["server added"] += 1
        elif not any(each.leaves or not each.undisturbed for each in servers):
            target = self._chance.choice(servers)
            target.leaves = True
            thread = threading.Thread(target=self._drain, args=(target.name,))
            self._drains.append(thread)
            thread.start()
            self.done["server drained"] += 1

    def _drain(self, server_id: str) -> None:
        """Repeats the request until it reaches the coordinator, which may be away."""
        while not self._over.is_set() and not self._cluster.drain(server_id):
            self._over.wait(0.2)

    def _ask_to_end(self, target: Target) -> None:
        if self._may_disturb(target) and not target.leaves:  # else its end is ambiguous
            assert target.child is not None
            target.doomed = "told to end"
            target.child.kill(signal.SIGTERM)
            self.done[f"{target.kind} told to end"] += 1

    def _stop(self, target: Target) -> None:
        if not self._may_disturb(target):
            return
        child = target.child
        assert child is not None
        target.stopped = True
        child.kill(signal.SIGSTOP)
        self.done[f"{target.kind} stopped"] += 1
        longest = 2 * LEASE_MS / 1000 if self._chance.random() < 0.1 else 1.0

        def go_on() -> None:
            child.kill(signal.SIGCONT)
            if target.child is child:
                target.stopped = False

        self._agenda.later(self._chance.uniform(0.05, longest), go_on)

    def _cut(self) -> None:
        held = self._chance.choice(self._cluster.relays).cut_some(self._chance)
        mend = self._chance.random() < 0.5
        for connection in held:
            self._agenda.later(
                self._chance.uniform(0.05, 2.0), connection.open if mend else connection.drop
            )
        self.done["link cut"] += bool(held)

    def _drop(self) -> None:
        self._chance.choice(self._cluster.relays).drop_some(self._chance)
        self.done["connections dropped"] += 1

    def _restart_redis(self) -> None:
        self._cluster.restart_redis()
        self.done["redis killed"] += 1
