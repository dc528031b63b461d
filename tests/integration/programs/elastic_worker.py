"""A member of a job that does not use torch: joins, prints what it receives, and leaves when asked.

It prints one line per generation, `generation G rank R of N`, and one when it leaves. On SIGTERM, a
drain or a stop it leaves as drained. Once the file named by its argument exists, it leaves as
finished, and reports that to its launcher in a file, as real workers do. Its heartbeats count
steps. It raises once a file raise-RANK, with its rank in the job, exists beside the file to finish.
If it is evicted, it exits with EVICTED.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.credentials import CallerSettings
from shoal_common.errors import (
    DeadlineError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.exit_status import EVICTED
from shoal_common.formats.runs import Run
from shoal_protos.v1 import coordinator_pb2 as pb


class Member:
    def __init__(self, finish_file: Path) -> None:
        self.finish_file = finish_file
        self.member_id = os.environ["SHOAL_MEMBER_ID"]
        self.leaving: pb.Leave.Reason | None = None
        self.streams = 0
        self.generation = 0
        self.interval_s = 0.1
        self.left = False
        self.rank = -1
        self.stopped = False
        self.raise_now = False
        received = (
            Run.parse(os.environ["SHOAL_RUN"], what="SHOAL_RUN")
            if "SHOAL_RUN" in os.environ
            else None
        )
        self.run_id = (
            None
            if received is None
            else pb.RunId(number=received.number, began_unix_ms=received.began_unix_ms)
        )

    def messages(self) -> Iterator[pb.MemberMessage]:
        self.streams += 1
        stream = self.streams
        yield pb.MemberMessage(
            join=pb.Join(
                job_id=os.environ["SHOAL_JOB_ID"],
                member_id=self.member_id,
                host=os.environ.get("SHOAL_HOST") or socket.gethostname(),
                pid=os.getpid(),
                launcher_id=os.environ["SHOAL_LAUNCHER_ID"],
                local_index=int(os.environ["SHOAL_LOCAL_INDEX"]),
                last_generation=self.generation,
                run=self.run_id,
            )
        )
        yield pb.MemberMessage(ready=pb.Ready())
        step = 0
        while stream == self.streams:  # gRPC keeps reading requests for a broken stream
            if self.finish_file.exists() and self.generation:
                self.leaving = pb.Leave.REASON_FINISHED
            if self.finish_file.with_name(f"raise-{self.rank}").exists():
                self.leaving, self.raise_now = pb.Leave.REASON_FAILED, True
            if self.leaving is not None:
                self.left = True
                yield pb.MemberMessage(leave=pb.Leave(reason=self.leaving))
                return
            progress = pb.Progress(
                step=step,
                sequence=step,
                samples_per_s=100.0,
                loss=1 / (step + 1),
                step_time_s=0.1,
                metrics={"accuracy": 0.75},
            )
            yield pb.MemberMessage(
                heartbeat=pb.Heartbeat(generation=self.generation, progress=progress)
            )
            step += 1
            time.sleep(self.interval_s)

    def leave(self, *_: object) -> None:
        self.leaving = pb.Leave.REASON_DRAINED

    def process_directive(self, directive: pb.MemberDirective) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                self.interval_s = min(0.1, directive.welcome.heartbeat_interval_ms / 1000)
            case "generation":
                ranks = directive.generation.ranks
                self.rank = next(rank.rank for rank in ranks if rank.member_id == self.member_id)
                self.generation = directive.generation.number
                print(f"generation {self.generation} rank {self.rank} of {len(ranks)}", flush=True)
            case "stop":
                self.stopped = True
                self.leave()
            case "drain":
                self.leave()

    def notify_launcher(self, what: str) -> None:
        Path(os.environ["SHOAL_MEMBER_FILE"]).write_text(what)

    def run(self) -> None:
        self.notify_launcher("joined")
        print(
            "told",
            *(
                f"{name}={os.environ[name]}"
                for name in ("SHOAL_ALLOW_RESTART_FROM_SCRATCH",)
                if name in os.environ
            ),
            flush=True,
        )
        deadline = time.monotonic() + 90
        settings = CallerSettings.load().channel(os.environ["SHOAL_COORDINATOR"])
        with CoordinatorClient(settings) as client:
            while not self.left:
                try:
                    for directive in client.join_session(self.messages()):
                        self.process_directive(directive)
                except PreconditionError as error:
                    raise SystemExit(0 if error.reason == "RUN_ENDED" else EVICTED) from error
                except (UnavailableError, DeadlineError, UnknownResourceError) as error:
                    if time.monotonic() > deadline:
                        raise SystemExit(str(error)) from error
                    time.sleep(0.02)
        if self.raise_now:
            raise ValueError(f"rank {self.rank} was asked to raise")
        if self.leaving == pb.Leave.REASON_FINISHED and not self.stopped:
            self.notify_launcher("finished")
        print("left", flush=True)


member = Member(Path(sys.argv[1]))
signal.signal(signal.SIGTERM, member.leave)
member.run()
