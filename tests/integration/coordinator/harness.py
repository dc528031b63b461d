"""Real coordinator processes, and members that use real gRPC to talk to them."""

from __future__ import annotations

import json
import queue
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.launcher.processes.ports import ReservedPort
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import ShoalError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.zygote.children import Child, Zygote, eventually

PATIENCE_S = 60.0
DONOR_KEY = "0123456789abcdef" * 2


class Coordinator:
    """One coordinator process, which can be stopped and started again on the same port. The port
    stays reserved meanwhile."""

    def __init__(
        self,
        zygote: Zygote,
        directory: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._zygote = zygote
        self._flags = flags
        self._reserved = ReservedPort()
        self._port_file = directory / f"ports-{uuid.uuid4().hex}.json"
        self._log = directory / "coordinator.log"
        self._environment = environment or {}
        self.ports: dict[str, Any] = {}
        self.process: Child

    def start(self, *, wait: bool = True, **environment: str) -> Coordinator:
        self._port_file.unlink(missing_ok=True)
        arguments = [
            "--port-file",
            str(self._port_file),
            "--listen",
            f"127.0.0.1:{self._reserved.port}",
            *self._flags,
        ]
        self.process = self._zygote.start(
            "coordinator", arguments, output=self._log, **{**self._environment, **environment}
        )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        eventually(
            lambda: self._port_file.exists() or self.process.ended.is_set(),
            "the coordinator's port file",
        )
        assert not self.process.ended.is_set(), self.log
        self.ports = json.loads(self._port_file.read_text())

    @property
    def address(self) -> str:
        return str(self.ports["grpc"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.kill(signal.SIGTERM)
        return self.process.wait()

    def close(self) -> None:
        if not self.process.ended.is_set():
            self.terminate()
        self._reserved.close()

    @property
    def log(self) -> str:
        return self.process.said()

    def client(self, **more: Any) -> CoordinatorClient:
        return CoordinatorClient(
            ChannelSettings(
                **{"address": self.ports["grpc"], "deadline": timedelta(seconds=30), **more}
            )
        )


class Job:
    """A job of a coordinator, and its members."""

    def __init__(
        self, coordinator: Coordinator | None, client: CoordinatorClient, job_id: str
    ) -> None:
        """`coordinator`: None if the coordinator is not managed by this test."""
        self.coordinator = coordinator
        self.client = client
        self.job_id = job_id
        self.members: list[Member] = []

    def join(self, name: str, **more: Any) -> Member:
        """Opens a session; its welcome may not have arrived yet."""
        member = Member(self, name, **more)
        self.members.append(member)
        return member

    def start(self, *names: str, **more: Any) -> list[Member]:
        """Starts members, which join one after another and report ready once all have joined."""
        joined = [self.join(name, **more) for name in names]
        for member in joined:
            member.welcome()
        for member in joined:
            member.ready()
        return joined

    def form(self, *names: str, **more: Any) -> list[Member]:
        """Starts members and waits until all have received the first generation, which consists of
        exactly these members. The job must wait for all of them (create_job)."""
        members = self.start(*names, **more)
        for member in members:
            generation = member.generation()
            assert (generation.number, sorted(ids(generation))) == (1, sorted(names)), (
                "the job began without waiting for all of them"
            )
            member.beat(generation.number)
        return members

    def get(self) -> pb.GetJobResponse:
        return self.client.get_job(self.job_id)

    def phase_of(self, name: str) -> str:
        """Returns the short name of a member's phase; "" if there is no such member."""
        found = [m for m in self.get().members if m.member_id == name]
        return (
            pb.MemberPhase.Name(found[0].phase).removeprefix("MEMBER_PHASE_").lower()
            if found
            else ""
        )

    def events(self) -> list[pb.Event]:
        return list(self.client.watch_events(self.job_id))

    def close(self) -> None:
        for member in self.members:
            member.kill()


class Member:
    """One session stream in this process; `kill` breaks it as the death of a process does."""

    def __init__(
        self,
        job: Job,
        name: str,
        *,
        host: str = "h1",
        index: int = 0,
        last: int = 0,
        pid: int = 1,
        client: CoordinatorClient | None = None,
        run: pb.RunId | None = None,
    ) -> None:
        self.job = job
        self.name = name
        self.seen: list[pb.MemberDirective] = []
        self.error: ShoalError | None = None
        self.ended = False
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[pb.MemberMessage | None] = queue.SimpleQueue()
        join = pb.Join(
            job_id=job.job_id,
            member_id=name,
            host=host,
            pid=pid,
            launcher_id="l",
            local_index=index,
            donor_address="127.0.0.1:1",
            donor_key=DONOR_KEY,
            metrics_address="127.0.0.1:9",
            last_generation=last,
            run=run,
        )
        self.say(pb.MemberMessage(join=join))
        self._stream = (client or job.client).join_session(iter(self._outgoing.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for directive in self._stream:
                with self._changed:
                    self.seen.append(directive)
                    self._changed.notify_all()
        except ShoalError as error:
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------- saying

    def say(self, message: pb.MemberMessage) -> None:
        self._outgoing.put(message)

    def ready(self) -> None:
        self.say(pb.MemberMessage(ready=pb.Ready()))

    def beat(self, generation: int = 0, **progress: Any) -> None:
        self.say(
            pb.MemberMessage(
                heartbeat=pb.Heartbeat(generation=generation, progress=pb.Progress(**progress))
            )
        )

    def fail(
        self, generation: int, *, suspects: Sequence[int] = (), timed_out: bool = False
    ) -> None:
        failure = pb.CollectiveFailure(
            generation=generation,
            suspects=suspects,
            timed_out=timed_out,
            detail="connection closed",
        )
        self.say(pb.MemberMessage(collective_failure=failure))

    def leave(self, reason: pb.Leave.Reason.ValueType) -> None:
        self.say(pb.MemberMessage(leave=pb.Leave(reason=reason)))

    def cut(self) -> None:
        """Breaks the stream without waiting for its end."""
        self._stream.cancel()

    def kill(self) -> None:
        self.cut()
        self._outgoing.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    # -------------------------------------------------------------------------------------- hearing

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.ended, PATIENCE_S)
            value = condition()
            assert value, f"{self.name} waited for {what}; it saw {self.seen}, {self.error!r}"
            return value

    def received(self, kind: str, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """Waits for a directive of this kind that `accept` accepts, and returns the newest one."""

        def newest() -> Any:
            found = [
                getattr(d, kind)
                for d in self.seen
                if d.WhichOneof("directive") == kind and accept(getattr(d, kind))
            ]
            return found[-1] if found else None

        return self.wait(newest, kind)

    def kinds(self) -> list[str]:
        with self._changed:
            return [directive.WhichOneof("directive") for directive in self.seen]

    def welcome(self) -> pb.Welcome:
        return self.received("welcome")

    def generation(self, accept: Callable[[pb.Generation], bool] = lambda _: True) -> pb.Generation:
        return self.received("generation", accept)

    def end(self) -> ShoalError | None:
        """Waits for the stream's end and returns its error; None: it ended without one."""
        self.wait(lambda: self.ended, "the end of its session")
        return self.error


class Server:
    """One parameter server's session."""

    def __init__(
        self,
        job: Job,
        name: str,
        *,
        pid: int = 1,
        incarnation: str = "",
        run: pb.RunId | None = None,
    ) -> None:
        self.seen: list[pb.ServerDirective] = []
        self.error: ShoalError | None = None
        self.ended = False
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[pb.ServerMessage | None] = queue.SimpleQueue()
        register = pb.RegisterServer(
            job_id=job.job_id,
            server_id=name,
            address=f"{name}:7000",
            metrics_address=f"{name}:9000",
            host="h",
            pid=pid,
            incarnation=incarnation,
            run=run,
        )
        self._outgoing.put(pb.ServerMessage(register=register))
        self._stream = job.client.server_session(iter(self._outgoing.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for directive in self._stream:
                with self._changed:
                    self.seen.append(directive)
                    self._changed.notify_all()
        except ShoalError as error:
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def received(self, kind: str, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        def newest() -> Any:
            found = [
                getattr(d, kind)
                for d in self.seen
                if d.WhichOneof("directive") == kind and accept(getattr(d, kind))
            ]
            return found[-1] if found else None

        with self._changed:
            self._changed.wait_for(lambda: newest() is not None or self.ended, PATIENCE_S)
            value = newest()
            assert value is not None, f"waited for {kind}; saw {self.seen}, {self.error!r}"
            return value

    def beat(self) -> None:
        self._outgoing.put(pb.ServerMessage(heartbeat=pb.ServerHeartbeat(stored_bytes=8)))

    def report(self, move: int, *, receiver: str = "", reason: str = "") -> None:
        """Reports that the process `receiver` has taken the partitions of a move; empty: they stay
        on this server."""
        report = pb.MoveReport(
            move=move, taken=bool(receiver), receiver_incarnation=receiver, reason=reason
        )
        self._outgoing.put(pb.ServerMessage(move=report))

    def end(self) -> ShoalError | None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, PATIENCE_S)
        return self.error

    def kill(self) -> None:
        self._stream.cancel()
        self._outgoing.put(None)
        self._thread.join(PATIENCE_S)


def ids(generation: pb.Generation) -> list[str]:
    """Returns the member ids in rank order."""
    return [rank.member_id for rank in generation.ranks]


def create_job(
    coordinator: Coordinator,
    client: CoordinatorClient,
    *,
    together: int = 0,
    smallest: int = 1,
    largest: int = 4,
    **more: Any,
) -> Job:
    """Creates a job. `together`: the first generation waits for this number of members, no matter
    how slowly they arrive, and the job accepts no more.

    A test's members send heartbeats only when the test says so. Their lease is therefore longer
    than any test, unless the test is about leases.
    """
    job_id = f"job-{uuid.uuid4().hex[:8]}"
    settings = {
        "max_workers": largest,
        "lease_ms": 120_000,
        **({"max_workers": together, "join_grace_ms": 120_000} if together else {}),
    }
    client.create_job(pb.JobSpec(job_id=job_id, min_workers=smallest, **{**settings, **more}))
    return Job(coordinator, client, job_id)
