"""One job under a seeded schedule of faults, written down (recording.py) and judged at its end (checking.py).

Coordinator, Redis, two parameter servers with data directories, or four where each has a backup, and three workers are processes; a relay
(tests/relay.py) stands before the coordinator and before each server, also for the servers' own connections. The seed chooses the faults,
their targets and their times; what they meet there is chance, as the processes run freely. A worker that is gone is replaced by a new
member; all else is started again over what it left, a server with its id, whatever its role is by then. One worker is always left alone, so
that the job is never without.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from shoal.launcher.ports import ReservedPort
from shoal_common.clients import ParameterServerClient
from shoal_common.errors import ShoalError
from shoal_common.exit_status import PUT_OUT
from shoal_common.redis.embedded import EmbeddedRedis
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import ServerImage, ServerState
from shoal_ps_server.storage.snapshot import write_snapshot

from tests.history import recording, training
from tests.history.checking import Job, promises
from tests.history.lines import History, Violation
from tests.history.verdict import Verdict, counts
from tests.integration.coordinator.harness import Coordinator
from tests.relay import Relay
from tests.zygote.children import Child, Zygote, eventually

WORKERS, SERVERS = 3, 2
BOUND = 3
MODES = ("asp", "ssp", "bsp", "backups", "moves")
"""asp, ssp(BOUND), bsp; asp where each server has a backup; and servers that come and are drained, with each of the three in turn."""
MOST_SERVERS = 3
"""With moves."""
_CONSISTENCY: dict[str, dict[str, Any]] = {
    "asp": {},
    "ssp": {"consistency": "ssp", "staleness_bound": BOUND},
    "bsp": {"consistency": "bsp"},
}
LEASE_MS = 3000
"""A worker that stands still for longer is put out."""

_LOOK_S = 0.01
"""Between two looks at processes and files, which tell nobody when they change; every wait for them has a deadline."""
_PACE_S = 0.5
"""From one fault to the next, on average."""
_LONGEST_ABSENCE_S = 0.6
"""Between the end of a process and the start of the next one in its place; now and then `_LONG_ABSENCE_S`."""
_LONG_ABSENCE_S = 3.0
_LONG_ABSENCES = 0.15
_SNAPSHOT_PACE_S = 1.0
_SNAPSHOT_INTERVAL_S = 2
"""Of backups, which cannot be asked for some, and so of all servers that may be one."""
_PROGRESS_EVERY = 20
"""After so many faults workers must have been acknowledged something since."""
_PROGRESS_WITHIN_S = 60.0

_SERVER_FAILPOINTS = {
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
"""With the latest hit at which it is killed there."""
_BACKUP_FAILPOINTS = {
    "backup.before_note": 2,
    "backup.holds": 2,
    "backup.cleared": 2,
    "backup.copied": 2,
    "backup.record_made": 100,
    "backup.promoted": 1,
}
"""Of servers that are backups, or have some."""
_MOVE_FAILPOINTS = {
    "move.frozen": 2,
    "move.taken": 2,
    "move.noted": 2,
    "move.reported": 2,
    "move.activated": 2,
    "move.dropped": 2,
}
"""Of servers that get partitions of each other."""
_WORKER_FAILPOINTS = {"exchange.server_answered": 100, "exchange.done": 50}
_COORDINATOR_FAILPOINTS = {"decision.before_write": 30, "decision.written": 30}


@dataclass(kw_only=True, eq=False)
class _Target:
    """One process that faults strike, and those that follow it in its place."""

    name: str
    start: Callable[[str], Child]
    """Starts one, with that for SHOAL_FAILPOINTS."""
    failpoints: dict[str, int]
    child: Child | None = None
    """None: it is to be started again."""
    armed: str = ""
    """The failpoint at which this one kills itself."""
    doomed: str = ""
    """What ends it: the fault that was done to it."""
    stopped: bool = False
    leaves: bool = False
    """It is to be drained: once it ends well, it comes back no more."""

    @property
    def undisturbed(self) -> bool:
        return self.child is not None and not self.child.ended.is_set() and not self.doomed and not self.stopped


class Campaign:
    """Belongs to the thread that makes it, but for the snapshots, which a thread of their own asks for."""

    def __init__(self, zygote: Zygote, directory: Path, *, mode: str, seed: int, faults: int) -> None:
        self._zygote = zygote
        self._directory = directory
        self._mode, self._seed = mode, seed
        self._backups = int(mode == "backups")
        self._moves = int(mode == "moves")
        self._consistency = mode if mode in _CONSISTENCY else ("asp", "ssp", "bsp")[seed % 3] if self._moves else "asp"
        self._goal = faults
        self._chance = random.Random(f"{mode} {seed}")
        self._history = directory / "history"
        self._records = directory / "records"
        self._end = directory / "end"
        self._job_id = f"job-{uuid.uuid4().hex[:8]}"
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._places = itertools.count()
        self._members = itertools.count()
        self._faults: Counter[str] = Counter()
        self._snapshots = 0
        self._restarts = 0
        self._put_out = 0
        self._drained = 0
        self._unexpected: list[Violation] = []
        self._read: dict[Path, int] = {}
        self._acknowledged = 0
        self._progress_at = 0
        self._ending = False
        self._over = threading.Event()

    def run(self) -> Verdict:
        """All of it. Everything that it starts is gone when it returns."""
        begun = time.monotonic()
        with ExitStack() as self._stack:
            self._start(self._stack)
            eventually(lambda: self._progress() > 0, "the first push to be acknowledged")
            self._stack.enter_context(self._snapshots_being_asked_for())
            self._strike_until_enough()
            self._end_well()
            owners = {} if self._unexpected else self._owners()
        return self._judge(time.monotonic() - begun, owners)

    # ------------------------------------------------------------------------------------------------------------ starting

    def _start(self, stack: ExitStack) -> None:
        for path in (self._directory, self._history):
            path.mkdir(parents=True, exist_ok=True)
        self._redis_port = stack.enter_context(ReservedPort())
        self._ports: list[ReservedPort] = []
        self._links: list[Relay] = []
        self._redis = EmbeddedRedis(self._directory / "redis", port=self._redis_port.port)
        stack.callback(self._close_redis)
        self._coordinator = Coordinator(self._zygote, self._directory, "--redis", self._redis.url).start()
        stack.callback(self._coordinator.close)
        self._relay = stack.enter_context(Relay(self._coordinator.address))
        with self._coordinator.client() as client:
            spec = pb.JobSpec(job_id=self._job_id, min_workers=1, max_workers=8, parameter_servers=SERVERS, lease_ms=LEASE_MS)
            spec.parameter_server_backups = self._backups
            spec.max_parameter_servers = MOST_SERVERS if self._moves else SERVERS
            client.create_job(spec)
        first = self._coordinator.process
        self._boss = _Target(name="coordinator", start=self._start_coordinator, failpoints=_COORDINATOR_FAILPOINTS, child=first)
        self._servers = [self._new_server() for _ in range(SERVERS * (1 + self._backups))]
        self._workers = [_Target(name=f"worker-{i}", start=self._start_worker, failpoints=_WORKER_FAILPOINTS) for i in range(WORKERS)]
        for target in (*self._servers, *self._workers):
            target.child = target.start("")
        stack.callback(self._kill_all)

    def _new_server(self) -> _Target:
        index = next(self._places)
        self._ports.append(self._stack.enter_context(ReservedPort()))
        self._links.append(self._stack.enter_context(Relay(f"127.0.0.1:{self._ports[index].port}")))
        failpoints = _SERVER_FAILPOINTS | (_BACKUP_FAILPOINTS if self._backups else {}) | (_MOVE_FAILPOINTS if self._moves else {})
        return _Target(name=f"server-{index}", start=partial(self._start_server, index), failpoints=failpoints)

    def _close_redis(self) -> None:
        self._redis.close()  # the last one of them

    def _kill_all(self) -> None:
        for target in (*self._workers, *self._servers, self._boss):
            if target.child is not None:
                target.child.kill()
                target.child.wait()

    def _start_coordinator(self, armed: str) -> Child:
        return self._coordinator.start(wait=False, SHOAL_FAILPOINTS=armed).process

    def _start_server(self, index: int, armed: str) -> Child:
        arguments = ["--coordinator", self._relay.address, "--job", self._job_id, "--server-id", f"server-{index}"]
        arguments += ["--listen", f"127.0.0.1:{self._ports[index].port}", "--data-dir", str(self._data(index))]
        arguments += ["--snapshot-interval", f"{_SNAPSHOT_INTERVAL_S * self._backups}s"]
        environment = {
            recording.DIRECTORY: str(self._history),
            recording.REACHED_AT: self._links[index].address,
            "SHOAL_FAILPOINTS": armed,
        }
        return self._zygote.start("recorded-server", arguments, output=self._directory / f"server-{index}.log", **environment)

    def _start_worker(self, armed: str) -> Child:
        number = next(self._members)
        options = {"lease_ahead": 2.0, **_CONSISTENCY[self._consistency]}
        config = {"end": str(self._end), "seed": self._seed * 1000 + number, "longest_step_s": 0.01, "options": options}
        environment = {
            recording.DIRECTORY: str(self._history),
            "SHOAL_COORDINATOR": self._relay.address,
            "SHOAL_JOB_ID": self._job_id,
            "SHOAL_MEMBER_ID": f"member-{number}",
            "SHOAL_LOCAL_INDEX": str(number),
            "SHOAL_RECORD_DIR": str(self._records),
            "SHOAL_RENDEZVOUS_TIMEOUT_S": "120",
            "SHOAL_FAILPOINTS": armed,
        }
        output = self._directory / f"member-{number}.log"
        return self._zygote.start("recorded-train", [json.dumps(config)], output=output, **environment)

    def _data(self, index: int) -> Path:
        return self._directory / f"server-{index}"

    # ------------------------------------------------------------------------------------------------------------- striking

    def _strike_until_enough(self) -> None:
        due = time.monotonic()
        while self._faults.total() < self._goal and not self._unexpected:
            now = time.monotonic()
            self._attend(now)
            if now >= due:
                self._strike()
                due = now + self._chance.expovariate(1 / _PACE_S)
                if self._faults.total() >= self._progress_at + _PROGRESS_EVERY:
                    self._progress_at = self._faults.total()
                    self._await_progress()
            time.sleep(_LOOK_S)

    def _attend(self, now: float) -> None:
        """Does what is due, and looks who has ended."""
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        for target in [self._boss, *self._servers, *self._workers]:
            if target.child is not None and target.child.ended.is_set():
                self._ended(target, target.child)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + delay_s, next(self._numbers), action))

    def _ended(self, target: _Target, child: Child) -> None:
        if child.status == -signal.SIGKILL and (target.doomed == "killed" or target.armed):
            if target.doomed != "killed":
                self._faults[f"{_kind(target)} killed at a failpoint"] += 1
        elif target in self._workers and child.status == PUT_OUT:
            self._put_out += 1
        elif target.leaves and child.status == 0:
            self._servers.remove(target)
            self._drained += 1
            return
        elif not (target.doomed == "told to end" and child.status in (0, -signal.SIGTERM)):  # it may have been only just starting
            said = child.said()[-3000:]
            self._unexpected.append(Violation(f"{target.name} ended by itself with status {child.status}; it said:\n{said}"))
        target.child, target.armed, target.doomed, target.stopped = None, "", "", False
        longest = _LONG_ABSENCE_S if self._chance.random() < _LONG_ABSENCES else _LONGEST_ABSENCE_S
        self._later(self._chance.uniform(0, longest), lambda: self._start_again(target))

    def _start_again(self, target: _Target) -> None:
        if self._ending or self._chance.random() < 0.6:
            target.armed = ""
        else:
            special = _BACKUP_FAILPOINTS if self._backups else _MOVE_FAILPOINTS if self._moves else {}
            between = special and target in self._servers and self._chance.random() < 0.5
            name = self._chance.choice(sorted(special if between else target.failpoints))
            target.armed = f"{name}@{self._chance.randint(1, target.failpoints[name])}=kill"
        target.child = target.start(target.armed)
        self._restarts += 1
        if self._backups and target in self._servers and not self._ending and self._chance.random() < 0.3:
            # While it is on its way to be in sync, or to hear what it is.
            self._later(self._chance.uniform(0, 1.5), lambda: self._kill(self._chance.choice(self._servers)))

    def _strike(self) -> None:
        kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (4, lambda: self._kill(self._chance.choice(self._servers))),
            (3, lambda: self._kill(self._chance.choice(self._workers))),
            (1, lambda: self._kill(self._boss)),
            (2, lambda: self._stop(self._chance.choice(self._servers))),
            (2, lambda: self._stop(self._chance.choice(self._workers))),
            (1, lambda: self._stop(self._boss)),
            (2, lambda: self._send_away(self._chance.choice([*self._workers, *self._servers, self._boss]))),
            (4, self._cut),
            (2, self._drop),
            (1, self._restart_redis),
            (2 * (self._backups or self._moves), self._kill_two),
            (8 * self._moves, self._come_or_go),
            (2 * self._backups, self._kill_with_coordinator),
        )
        strike = self._chance.choices([each for _, each in kinds], [weight for weight, _ in kinds])[0]
        strike()

    def _may_disturb(self, target: _Target) -> bool:
        others = [each for each in self._workers if each is not target and each.undisturbed]
        return target.undisturbed and (target not in self._workers or bool(others))

    def _kill(self, target: _Target) -> None:
        if self._may_disturb(target):
            assert target.child is not None
            target.doomed = "killed"
            target.child.kill()
            self._faults[f"{_kind(target)} killed"] += 1

    def _kill_two(self) -> None:
        """A primary and its backup, or one of each place."""
        for target in self._chance.sample(self._servers, 2):
            self._kill(target)

    def _kill_with_coordinator(self) -> None:
        """So that the server may come back before anybody can say what it is."""
        self._kill(self._boss)
        self._kill(self._chance.choice(self._servers))

    def _come_or_go(self) -> None:
        """A server comes, or one is drained."""
        if len(self._servers) < MOST_SERVERS:
            target = self._new_server()
            self._servers.append(target)
            armed = f"{self._chance.choice(sorted(_MOVE_FAILPOINTS))}@1=kill" if self._chance.random() < 0.3 else ""
            target.armed, target.child = armed, target.start(armed)
            self._faults["server added"] += 1
        elif not any(each.leaves or not each.undisturbed for each in self._servers):
            target = self._chance.choice(self._servers)
            target.leaves = True
            thread = threading.Thread(target=self._drain, args=(target.name,))
            thread.start()
            self._stack.callback(thread.join)
            self._faults["server drained"] += 1

    def _drain(self, server_id: str) -> None:
        """Asks until the coordinator has heard it, which may be away."""
        while not self._over.is_set():
            with suppress(ShoalError), self._coordinator.client() as client:
                client.drain_server(self._job_id, server_id, reason="it is its turn")
                return
            self._over.wait(0.2)

    def _send_away(self, target: _Target) -> None:
        if self._may_disturb(target) and not target.leaves:  # else nobody could say why it ended
            assert target.child is not None
            target.doomed = "told to end"
            target.child.kill(signal.SIGTERM)
            self._faults[f"{_kind(target)} told to end"] += 1

    def _stop(self, target: _Target) -> None:
        if not self._may_disturb(target):
            return
        child = target.child
        assert child is not None
        target.stopped = True
        child.kill(signal.SIGSTOP)
        self._faults[f"{_kind(target)} stopped"] += 1
        longest = 2 * LEASE_MS / 1000 if self._chance.random() < 0.1 else 1.0

        def go_on() -> None:
            child.kill(signal.SIGCONT)
            if target.child is child:
                target.stopped = False

        self._later(self._chance.uniform(0.05, longest), go_on)

    def _cut(self) -> None:
        held = self._chance.choice([self._relay, *self._links]).cut_some(self._chance)
        mend = self._chance.random() < 0.5
        for connection in held:
            self._later(self._chance.uniform(0.05, 2.0), connection.open if mend else connection.drop)
        self._faults["link cut"] += bool(held)

    def _drop(self) -> None:
        self._chance.choice([self._relay, *self._links]).drop_some(self._chance)
        self._faults["connections dropped"] += 1

    def _restart_redis(self) -> None:
        os.kill(self._redis.pid, signal.SIGKILL)
        self._redis.close()
        self._redis = EmbeddedRedis(self._directory / "redis", port=self._redis_port.port)
        self._faults["redis killed"] += 1

    @contextmanager
    def _snapshots_being_asked_for(self) -> Iterator[None]:
        chance = random.Random(self._seed)

        def ask() -> None:
            while not self._over.wait(chance.expovariate(1 / _SNAPSHOT_PACE_S)):
                settings = ChannelSettings(address=f"127.0.0.1:{chance.choice(self._ports).port}", attempts=1)
                with suppress(ShoalError), ParameterServerClient(settings) as client:  # it may be away, or go away meanwhile
                    client.snapshot(self._job_id, deadline=timedelta(seconds=3))
                    self._snapshots += 1

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    # ------------------------------------------------------------------------------------------------------------- progress

    def _progress(self) -> int:
        """How many pushes have been acknowledged to workers."""
        for path in self._history.glob("member-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                self._acknowledged += file.read().count(b'"kind":"pushed"')
                self._read[path] = file.tell()
        return self._acknowledged

    def _await_progress(self) -> None:
        before, deadline = self._progress(), time.monotonic() + _PROGRESS_WITHIN_S
        while self._progress() == before and not self._unexpected:
            self._attend(time.monotonic())
            time.sleep(_LOOK_S)
            if time.monotonic() > deadline:
                said = "\n".join(f"{each.name}: {each.child.said()[-1500:]}" for each in self._workers if each.child is not None)
                self._unexpected.append(
                    Violation(f"nothing was acknowledged for {_PROGRESS_WITHIN_S:g} s after fault {self._faults.total()}; {said}")
                )

    # ------------------------------------------------------------------------------------------------------------- the end

    def _end_well(self) -> None:
        """Lets everything come back, and the workers finish their epoch."""
        self._ending = True
        while self._agenda and not self._unexpected:
            self._attend(time.monotonic())
            time.sleep(_LOOK_S)
        self._end.touch()
        deadline = time.monotonic() + 2 * _PROGRESS_WITHIN_S
        waiting: list[_Target] = [*self._workers, *self._servers]
        while waiting and not self._unexpected:
            for target in list(waiting):
                if target.child is None or not target.child.ended.is_set():
                    continue
                if target.child.status == 0 and not target.doomed:
                    waiting.remove(target)
                else:
                    self._ended(target, target.child)
            if self._boss.child is not None and self._boss.child.ended.is_set():
                self._ended(self._boss, self._boss.child)
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heapq.heappop(self._agenda)[2]()
            if time.monotonic() > deadline:
                said = "\n".join(f"{each.name}: {each.child.said()[-1500:]}" for each in waiting if each.child is not None)
                self._unexpected.append(Violation(f"{', '.join(each.name for each in waiting)} did not come to the end; {said}"))
            time.sleep(_LOOK_S)

    def _owners(self) -> Mapping[str, frozenset[int]]:
        """Primary -> its partitions."""
        with self._coordinator.client() as client:
            shard_map = client.get_shard_map(self._job_id).shard_map
        return {
            server.server_id: frozenset(each.partition_id for each in shard_map.partitions if each.primary == server.server_index)
            for server in shard_map.servers
        }

    def _held_at_the_end(self, server_id: str, owned: frozenset[int]) -> Path:
        """A snapshot of what a server has on disk of its partitions: one with a backup in sync writes none of its own, and one that
        ends may have some still that another one has taken."""
        path = self._directory / f"{server_id}-at-the-end.safetensors"
        with DataDirectory(self._directory / server_id) as directory:
            recovered = directory.recover(job_id=self._job_id, server_id=server_id)
        shard = recovered.shard
        assert recovered.layout is not None, "there were pushes"
        state = ServerState(
            job_id=self._job_id,
            server_id=server_id,
            layout=recovered.layout,
            configuration=recovered.configuration,
            membership=recovered.members,
        )
        images = (shard.image(partition_id) for partition_id in shard.partition_ids() if partition_id in owned)
        write_snapshot(path, ServerImage(state=state, partitions=tuple(image for image in images if image is not None)))
        return path

    def _judge(self, seconds: float, owners: Mapping[str, frozenset[int]]) -> Verdict:
        verdict = Verdict(mode=self._mode, seed=self._seed, faults=self._faults, seconds=seconds)
        history = History.read(self._history)
        if self._unexpected:
            verdict.broken["every process goes on, or comes back"] = self._unexpected
        job = Job(
            records=self._records,
            snapshots=[self._held_at_the_end(*each) for each in owners.items()],
            adam=training.ADAM,
            batch_size=training.BATCH_SIZE,
            bound=BOUND if self._mode == "ssp" else None,
            in_step=self._mode == "bsp",
        )
        for promise, find in promises(history, job, ended_well=not self._unexpected).items():
            violations = list(itertools.islice(find(), 1000))
            if violations:
                verdict.broken[promise] = violations
            else:
                verdict.held.append(promise)
        verdict.counts = counts(history) | {
            "snapshots": self._snapshots,
            "processes started again": self._restarts,
            "members put out": self._put_out,
            "servers drained": self._drained,
        }
        return verdict


def _kind(target: _Target) -> str:
    return target.name.partition("-")[0]
