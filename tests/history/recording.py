"""Writes down every push and pull, where it is made and where it is answered: one file of JSON
lines per process, for `checking.py`.

Each line is one write to a file opened with O_APPEND, so that a process that is killed has written
all that it came to. Times are of the machine's monotonic clock, in nanoseconds, so lines of
different processes can be compared. Digests are xxh3-64 of bytes, in hex.

A worker writes, around its calls to `ParameterServerClient`:

    {"kind": "push", "t", "call", "of", "member", "partition", "sequence", "batch", "base",
     "clock", "absent", "gradient", "at"}
        a partition is about to be sent; `gradient`: its bytes, in hex
    {"kind": "pushed", "t", "call", "of", "answers": [{"partition", "sequence", "batch",
     "version", "duplicate", "known"}]}
    {"kind": "values", "t", "call", "of", "partition", "values"}
        first values are about to be sent, or a checkpoint's rows of a bucket; `values`: their
        bytes, in hex
    {"kind": "pull", "t", "call", "of", "member", "clock", "at"}
        `member` is empty for one that waits for nobody; `at`: the address
    {"kind": "pulled", "t", "call", "of", "answers": [{"partition", "version", "unchanged",
     "digest", "ids"}]}
        `ids`: of the rows that were looked up, in hex; empty where all of a partition is; `digest`:
        empty where no values came
    {"kind": "clock", "t", "of", "member", "clock", "place"}
        a member is about to say how far it is, without a push or a pull; the largest int64: it
        rests; `place`: at which clock of the server's, 0: as before
    {"kind": "failed", "t", "call", "of", "reason"}
        a push, a pull or first values

`of` is the worker, `call` numbers its calls. A server writes:

    {"kind": "starts", "t", "of", "pid", "address"}
        before it has recovered; `address`: where clients reach it
    {"kind": "placed", "t", "of", "span", "index", "epoch", "follows", "serves"}
        a primary hears what it is from now on; `follows`: a backup; `serves`: it may
    {"kind": "restored", "t", "of", "span", "partition", "version", "digest"}
        out of a snapshot, or of another server's copy
    {"kind": "applied", "t", "of", "span", "partition", "version", "member", "sequence", "batch",
     "clock", "gradient", "digest", "again"}
        `version`, `digest`: after it; `gradient`: its digest; `sequence` 0: first values; `again`:
        by a recovery, or by a backup; `bucket`, on the line of version 1 of a bucket of the sparse
        table alone: its number; nothing was sent for this version, and `gradient` is empty.
        `restoration`: a checkpoint's rows took their place, whose digest is `gradient`
    {"kind": "known", "t", "of", "span", "partition", "version", "member", "sequence", "batch",
     "clock"}
        answered, and not applied
    {"kind": "sent", "t", "of", "span", "partition", "version"}
        a pull has sent it whole
    {"kind": "clocks", "t", "of", "slowest", "clocks": {member: [clock, origin]}, "resting": [...]}
        as the server begins with them
    {"kind": "members", "t", "of", "generation", "members": [...]}
    {"kind": "finished", "t", "of", "member", "clock", "place"}
        a member said that it has finished so many iterations
    {"kind": "turn", "t", "of", "member"}
        a member's pull waits for slower ones no longer

The `gradient` of a push of rows is its payload, ids and gradients; the `digest` of a bucket is that
of all its rows (`lines.rows_digest`). `of` is the server's id. A `span` is what a process holds
from a recovery, or from a copy of its primary's, to the next one.

The program of a server (`serve`) and that of a worker (`train`) are those of the zygote with these
lines beside them; each is started in a process of its own, whose classes they replace.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal_ps_server.__main__
import shoal_ps_server.server
import shoal_ps_server.serving
import shoal_ps_server.storage.recovery
import shoal_worker.parameter_servers.coordination.job
import torch
from shoal_common.clients.parameter_server import ParameterServerClient, Partitions
from shoal_common.errors import ShoalError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.tables.file import read_bucket
from shoal_common.tables.values import Ids
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.consistency.fence import Change
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.server import ParameterServer
from shoal_ps_server.session import Place
from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.payload import Upload, UploadHeader, bytes_of
from shoal_ps_server.shard.reading import Reading
from shoal_ps_server.shard.shard import Admitted, Outcome, Restoration, Shard
from shoal_ps_server.shard.table_rows import TableRows

from tests.history import training
from tests.history.lines import digest, rows_digest

DIRECTORY = "SHOAL_TEST_HISTORY"
"""Environment variable that names the directory."""

REACHED_AT = "SHOAL_TEST_REACHED_AT"
"""Environment variable with the address at which workers reach a server: the address of a relay in
front of the server."""


class Recorder:
    """One process's file. Thread-safe."""

    def __init__(self, directory: Path, of: str) -> None:
        self._of = of
        name = directory / f"{of}-{os.getpid()}.jsonl"
        self._file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._calls = itertools.count(1)

    def call(self) -> int:
        """Returns a number for a call."""
        return next(self._calls)

    def write(self, kind: str, **fields: Any) -> None:
        line = (
            json.dumps(
                {"kind": kind, "t": time.monotonic_ns(), "of": self._of, **fields},
                separators=(",", ":"),
            ).encode()
            + b"\n"
        )
        assert os.write(self._file, line) == len(line), "the disk of the history is full"


# ------------------------------------------------------------------------------------------ workers


def recording_client(recorder: Recorder) -> type[ParameterServerClient]:
    """Returns a client class that records its pushes and pulls and their outcomes."""

    class RecordingClient(ParameterServerClient):
        def __init__(self, settings: ChannelSettings, **more: Any) -> None:
            self.address = settings.address
            super().__init__(settings, **more)

        def initialize(self, partitions: Partitions, **deadline: Any) -> list[pb.PartitionResult]:
            with self._noting_failures() as call:

                def noted() -> Iterator[tuple[pb.PushHeader, memoryview]]:
                    for header, payload in partitions:
                        recorder.write(
                            "values",
                            call=call,
                            partition=header.partition_id,
                            values=bytes(payload).hex(),
                        )
                        yield header, payload

                return super().initialize(noted(), **deadline)

        def push(self, partitions: Partitions, **deadline: Any) -> list[pb.PartitionResult]:
            with self._noting_failures() as call:
                sent: list[pb.PushHeader] = []

                def noted() -> Iterator[tuple[pb.PushHeader, memoryview]]:
                    for header, payload in partitions:
                        sent.append(header)
                        recorder.write(
                            "push",
                            call=call,
                            **_named(header),
                            base=header.base_version,
                            clock=header.clock,
                            absent=list(header.absent_pieces),
                            gradient=bytes(payload).hex(),
                            member=header.member_id,
                            at=self.address,
                        )
                        yield header, payload

                results = super().push(noted(), **deadline)
                answers = [
                    {
                        **_named(header),
                        "version": result.version,
                        "duplicate": result.duplicate,
                        "known": result.known_batch,
                    }
                    for header, result in zip(sent, results, strict=True)
                ]
                recorder.write("pushed", call=call, answers=answers)
                return results

        def pull(
            self,
            request: pb.PullRequest,
            into: Callable[[pb.PullHeader], memoryview | None],
            *,
            deadline: timedelta | None = None,
        ) -> list[pb.PullHeader]:
            with self._noting_failures() as call:
                buffers: dict[int, memoryview | None] = {}

                def noted(header: pb.PullHeader) -> memoryview | None:
                    buffers[header.partition_id] = into(header)
                    return buffers[header.partition_id]

                recorder.write(
                    "pull",
                    call=call,
                    member=request.member_id,
                    clock=request.clock,
                    at=self.address,
                )
                headers = super().pull(request, noted, deadline=deadline)
                ids = {each.partition_id: each.ids.hex() for each in request.partitions}
                answers = [
                    _pulled(header, buffers.get(header.partition_id), ids[header.partition_id])
                    for header in headers
                ]
                recorder.write("pulled", call=call, answers=answers)
                return headers

        def read_rows(
            self,
            request: pb.ReadRowsRequest,
            write: Callable[[memoryview], object],
            **deadline: Any,
        ) -> pb.RowsHeader:
            with self._noting_failures() as call:
                data = bytearray()

                def noted(piece: memoryview) -> object:
                    data.extend(piece)
                    return write(piece)

                recorder.write("pull", call=call, member="", clock=0, at=self.address)
                header = super().read_rows(request, noted, **deadline)
                found = read_bucket(memoryview(data))
                there = {
                    "partition": request.partition_id,
                    "version": found.version,
                    "digest": rows_digest(found.rows),
                    "ids": "",
                }
                recorder.write("pulled", call=call, answers=[{**there, "unchanged": False}])
                return header

        def restore_rows(
            self, header: pb.RowsHeader, payload: Iterable[memoryview], **deadline: Any
        ) -> pb.RestoreRowsResponse:
            with self._noting_failures() as call:
                pieces = [bytes(piece) for piece in payload]
                recorder.write(
                    "values",
                    call=call,
                    partition=header.partition_id,
                    values=b"".join(pieces).hex(),
                )
                return super().restore_rows(header, map(memoryview, pieces), **deadline)

        def advance_clock(
            self, job_id: str, member_id: str, *, clock: int, place: int = 0, **more: Any
        ) -> pb.AdvanceClockResponse:
            recorder.write("clock", member=member_id, clock=clock, place=place)
            return super().advance_clock(job_id, member_id, clock=clock, place=place, **more)

        @contextmanager
        def _noting_failures(self) -> Iterator[int]:
            call = recorder.call()
            try:
                yield call
            except ShoalError as error:
                recorder.write("failed", call=call, reason=f"{type(error).__name__} {error.reason}")
                raise

    return RecordingClient


def _named(header: pb.PushHeader) -> dict[str, int]:
    return {"partition": header.partition_id, "sequence": header.sequence, "batch": header.batch}


def _pulled(header: pb.PullHeader, buffer: memoryview | None, ids: str) -> dict[str, Any]:
    there = "" if buffer is None or not buffer.nbytes else digest(buffer)
    return {
        "partition": header.partition_id,
        "version": header.version,
        "unchanged": header.unchanged,
        "digest": there,
        "ids": ids,
    }


def train(arguments: Sequence[str]) -> int:
    """Runs a worker whose calls are recorded."""
    recorder = Recorder(Path(os.environ[DIRECTORY]), os.environ["SHOAL_MEMBER_ID"])
    shoal_worker.parameter_servers.coordination.job.ParameterServerClient = recording_client(
        recorder
    )
    return training.main(arguments)


# ------------------------------------------------------------------------------------------ servers


def recording_shard(recorder: Recorder) -> type[Shard]:
    """Returns a shard class that records each change that it makes, and each push that it already
    knows."""

    spans = itertools.count(1)

    class RecordingShard(Shard):
        def __init__(self, *, restored: Iterable[PartitionImage] = (), **more: Any) -> None:
            self.span = next(spans)
            self._again = False
            images = tuple(restored)
            for image in images:
                self._restored(image)
            super().__init__(restored=images, **more)

        def put(self, image: PartitionImage) -> None:
            self._restored(image)
            super().put(image)

        def adopt(self, layout: Layout) -> None:
            fresh = layout.partitions.keys() - self.partition_ids()
            super().adopt(layout)
            for spec in map(layout.partitions.__getitem__, sorted(fresh)):
                if spec.bucket is not None:
                    begun = {
                        "partition": spec.partition_id,
                        "version": 1,
                        "member": "",
                        "sequence": 0,
                        "batch": 0,
                        "clock": 0,
                    }
                    self._write_applied(begun, gradient="", again=True, bucket=spec.bucket.number)

        def apply(self, admitted: Admitted) -> Outcome:
            outcome = super().apply(admitted)
            if admitted.values is None:
                self._known(admitted.header, outcome.version)
            else:
                self._applied(admitted.header, outcome.version, admitted.values, again=self._again)
            return outcome

        def initialize(self, upload: Upload) -> Outcome:
            self._again = True  # the server makes such a change through `apply`
            try:
                return super().initialize(upload)
            finally:
                self._again = False

        def redo(self, upload: Upload, **how: Any) -> int:
            version = super().redo(upload, **how)
            self._applied(upload.header, version, upload.values(), again=True)
            return version

        def known(self, header: UploadHeader) -> Outcome:
            outcome = super().known(header)
            if header.sequence:
                self._known(header, outcome.version)
            return outcome

        @contextmanager
        def reading(self, partition_id: int, *codec: int) -> Iterator[Reading]:
            with super().reading(partition_id, *codec) as reading:
                yield reading
                recorder.write(
                    "sent", span=self.span, partition=partition_id, version=reading.version
                )

        def bucket_image(self, spec: PartitionSpec) -> PartitionImage:
            image = super().bucket_image(spec)
            recorder.write(
                "sent", span=self.span, partition=spec.partition_id, version=image.version
            )
            return image

        def restore(self, restoration: Restoration) -> Outcome:
            partition_id = restoration.spec.partition_id
            again = not self._partitions[partition_id].is_restoring
            outcome = super().restore(restoration)
            made = {
                "partition": partition_id,
                "version": outcome.version,
                "member": "",
                "sequence": 0,
                "batch": 0,
                "clock": 0,
            }
            number = self.restoration(partition_id)
            self._write_applied(
                made, gradient=digest(restoration.payload), again=again, restoration=number
            )
            return outcome

        def read_rows(self, partition_id: int, ids: Ids) -> Reading:
            reading = super().read_rows(partition_id, ids)
            recorder.write("sent", span=self.span, partition=partition_id, version=reading.version)
            return reading

        def _restored(self, image: PartitionImage) -> None:
            values = (
                digest(bytes_of(image.values)) if image.rows is None else rows_digest(image.rows)
            )
            recorder.write(
                "restored",
                span=self.span,
                partition=image.spec.partition_id,
                version=image.version,
                digest=values,
            )

        def _applied(
            self, header: UploadHeader, version: int, values: torch.Tensor, *, again: bool
        ) -> None:
            self._write_applied(
                _described(header, version), gradient=digest(bytes_of(values)), again=again
            )

        def _write_applied(
            self, described: Mapping[str, Any], *, gradient: str, again: bool, **more: Any
        ) -> None:
            partition = self._partitions[described["partition"]]
            if isinstance(partition, TableRows):
                after = rows_digest(partition.rows.image())
            else:
                assert partition.values is not None
                after = digest(bytes_of(partition.values))
            recorder.write(
                "applied",
                span=self.span,
                **described,
                gradient=gradient,
                digest=after,
                again=again,
                **more,
            )

        def _known(self, header: UploadHeader, version: int) -> None:
            recorder.write("known", span=self.span, **_described(header, version))

    return RecordingShard


def _described(header: UploadHeader, version: int) -> dict[str, Any]:
    return {
        "partition": header.spec.partition_id,
        "version": version,
        "member": header.member_id,
        "sequence": header.sequence,
        "batch": header.batch,
        "clock": header.clock,
    }


def recording_membership(recorder: Recorder) -> type[Membership]:
    """Returns a membership class that records clocks and members in the order in which the server
    learns of them."""

    class RecordingMembership(Membership):
        def __init__(self, **parts: Any) -> None:
            super().__init__(**parts)
            clocks = {
                member: [each.clock, each.origin] for member, each in self.clocks.members.items()
            }
            resting = [member for member, each in self.clocks.members.items() if each.rests]
            recorder.write("clocks", slowest=self.clocks.slowest, clocks=clocks, resting=resting)

        def learn(
            self, generation: int, members: Iterable[str], key_digests: Mapping[str, str]
        ) -> Change:
            change = super().learn(generation, members, key_digests)
            recorder.write(
                "members", generation=self.fence.generation, members=sorted(self.fence.members)
            )
            return change

        def finished(self, member: str, clock: int, *, place: int = 0) -> None:
            if member in self.fence.members:
                recorder.write("finished", member=member, clock=clock, place=place)
            super().finished(member, clock, place=place)

        async def proceed(
            self, member: str, generation: int, *, wait: timedelta, **more: Any
        ) -> None:
            await super().proceed(member, generation, wait=wait, **more)
            recorder.write("turn", member=member)

    return RecordingMembership


def recording_server(recorder: Recorder) -> type[ParameterServer]:
    """Returns a server class that records the roles that the coordinator assigns to it."""

    class RecordingServer(ParameterServer):
        def placed(self, place: Place) -> None:
            super().placed(place)
            received = {
                "index": self._primary_place.server_index,
                "epoch": place.epoch,
                "follows": place.follows,
            }
            recorder.write(
                "placed",
                **received,
                span=self._shard.span,
                serves=not place.follows and self._primary_place.is_known,
            )

    return RecordingServer


def serve(arguments: Sequence[str]) -> int:
    """Runs a server whose changes are recorded."""
    server_id = arguments[arguments.index("--server-id") + 1]
    recorder = Recorder(Path(os.environ[DIRECTORY]), server_id)
    reached_at = os.environ[REACHED_AT]
    recorder.write("starts", pid=os.getpid(), address=reached_at)
    shard = recording_shard(recorder)
    for module in (
        shoal_ps_server.server,
        shoal_ps_server.serving,
        shoal_ps_server.storage.recovery,
    ):
        module.Shard = shard
    shoal_ps_server.server.Membership = recording_membership(recorder)
    shoal_ps_server.serving.ParameterServer = recording_server(recorder)
    PsServerSettings.advertised = lambda settings, port: reached_at
    return shoal_ps_server.__main__.main(arguments)
