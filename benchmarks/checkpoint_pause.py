"""T19: how long a checkpoint of 0.8 GB delays training, and how fast it is written, read and
uploaded. Shoal is compared with `torch.distributed.checkpoint` (DCP), with the disk alone, and with
the object store's client alone.

A checkpoint delays steps in two ways: the state is copied, and then threads or processes write it
while training continues on the same cores. The pause is therefore the delay of the slowest step
between the start of the save and the completion of the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import beside_python, free_port, listens

RANKS: Final = 2
BATCH: Final = 4
STATE_MB: Final = 805
QUICK_STATE_MB: Final = 80
ALLOWED_S: Final = 0.05
_SAVES: Final = 3
_QUICK_SAVES: Final = 2
_BETWEEN: Final = 7
"""Steps between two saves, which is enough for a checkpoint to be written."""
_BETWEEN_UPLOADS: Final = 25
_WARM_UP_SAVES: Final = 1
"""Saves at the beginning that do not count. DCP starts its process in the first one."""
_LOADS: Final = 2
_QUICK_LOADS: Final = 1
_RAW_ROUNDS: Final = 2
_CHUNK: Final = 8 << 20
_TIMEOUT_S: Final = 600
_MODULE: Final = "benchmarks.workers.saving"
_BYTES_PER_WEIGHT: Final = 8
"""Bytes of a weight and its momentum in float32."""
_SQUARE_LAYERS: Final = 3
_BUCKET: Final = "benchmark"
_KEYS: Final = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system that saves checkpoints of one strategy."""

    name: str
    saver: str
    strategy: str

    @property
    def launcher(self) -> tuple[str, ...]:
        """The first part of the command, which starts the ranks, up to the name of the module."""
        program = ("shoal", "run") if self.saver == "shoal" else ("torchrun",)
        return (*program, "--standalone", "--nproc-per-node", str(RANKS), "-m", _MODULE)

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        own = ("--saver", self.saver, "--strategy", self.strategy)
        return " ".join((*self.launcher, *own))


CANDIDATES: Final = tuple(
    Candidate(name=f"{name}, {shown}", saver=saver, strategy=strategy)
    for strategy, theirs in (("ddp", "DDP"), ("fsdp", "FSDP2"))
    for saver, name, shown in (
        ("shoal", "shoal", strategy),
        ("dcp-thread", "DCP, thread", theirs),
        ("dcp-process", "DCP, process", theirs),
    )
)


@dataclass(kw_only=True)
class Measured:
    """Measurements of one system, one entry per save or load."""

    step_s: list[float] = field(default_factory=list)
    """Median step without a checkpoint."""
    pauses_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    """Total delay of all steps until the checkpoint is complete, in seconds."""
    written_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    failure: str = ""


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 12 minutes."""
    megabytes = QUICK_STATE_MB if options.quick else STATE_MB
    saves, loads = (_QUICK_SAVES, _QUICK_LOADS) if options.quick else (_SAVES, _LOADS)
    nbytes = 1e6 * megabytes
    measured = [(each, _saved_and_loaded(each, nbytes, saves, loads)) for each in CANDIDATES]
    writes_s, reads_s = _raw_disk(nbytes)
    copies_s = _memory_copies(nbytes)
    rows = [
        *(_row(candidate, each, nbytes) for candidate, each in measured),
        Row(
            name="the disk alone",
            command="writes 8 MiB at a time, then fsync; reads from the page cache",
            cells={
                "write GB/s": _rate(nbytes, writes_s),
                "load GB/s": _rate(nbytes, reads_s),
            },
            samples={"written_s": writes_s, "load_s": reads_s},
        ),
        Row(
            name="a copy in memory",
            command="copies all bytes once, with one thread, into memory that is in use",
            cells={"pause s": f"{statistics.median(copies_s):.3f}"},
            samples={"copies_s": copies_s},
        ),
        *_uploads(nbytes / 4),
    ]
    plots.samples(
        options.output / "t19.png",
        [row for row in rows if row.samples.get("pause_s")],
        sample="pause_s",
        label="pause of training at a checkpoint, s",
        target=ALLOWED_S,
    )
    return Table(
        key="t19",
        title=f"A checkpoint of {nbytes / 1e9:g} GB while training continues, against DCP",
        target=f"pause <= {ALLOWED_S} s, and no longer than DCP's",
        method=(
            f"{RANKS} ranks with one thread each train a perceptron, {BATCH} samples per rank per "
            f"step; its weights and momentum have {nbytes / 1e9:g} GB. The state is saved "
            f"{saves} times, {_BETWEEN} steps apart, into a directory, after a save that does not "
            "count. The pause is the slowest step from the one that ends with the call until the "
            "checkpoint is complete, minus the median step; lost is what all steps in this time "
            "take longer. The larger value of both ranks counts. Ranks and writers share two "
            "cores. DCP keeps the memory of its copies, as Shoal does, and its ranks agree in a "
            "separate group. "
            "Loads are repeated in new processes, from the page cache. Uploads go to moto's S3 "
            f"server on the same cores, {nbytes / 4e9:g} GB, from the call until everything is "
            "uploaded, after training and another upload; the client alone copies the files of "
            "such a checkpoint with s3fs. Values are medians."
        ),
        columns=("step s", "pause s", "longest pause s", "lost s", "write GB/s", "load GB/s"),
        rows=tuple(rows),
        verdict=_verdict(measured, statistics.median(copies_s)),
    )


def pauses(run: dict[str, Any], written_s: Sequence[float]) -> list[tuple[float, float]]:
    """Returns, for each save of one rank, the delay of the slowest step and the total delay of all
    steps, in seconds. `run`: measurements of the rank. `written_s`: seconds from the start of each
    save until its checkpoint was complete."""
    steps_s, usual_s = run["steps_s"], run["step_s"]
    found = []
    for first, written in zip(run["saved_at"], written_s, strict=True):
        late = [steps_s[first] - usual_s]
        elapsed = late[0]
        for step_s in steps_s[first + 1 :]:
            if elapsed > written:
                break
            late.append(step_s - usual_s)
            elapsed += step_s
        found.append((max(late), sum(late)))
    return found


def _saved_and_loaded(candidate: Candidate, nbytes: float, saves: int, loads: int) -> Measured:
    measured = Measured()
    try:
        with Stage() as stage:
            runs = _run(stage, candidate, nbytes, "save", saves=_WARM_UP_SAVES + saves)
            written_s = runs[0]["written_s"]
            if len(written_s) != _WARM_UP_SAVES + saves:
                raise MeasurementError(f"only {len(written_s)} checkpoints were completed")
            by_rank = [pauses(run, written_s)[_WARM_UP_SAVES:] for run in runs]
            for each in zip(*by_rank, strict=True):
                measured.pauses_s.append(max(pause for pause, _ in each))
                measured.lost_s.append(max(lost for _, lost in each))
            measured.step_s = [run["step_s"] for run in runs]
            measured.written_s = written_s[_WARM_UP_SAVES:]
            _read_files(stage.directory / "checkpoints")
            for turn in range(loads):
                runs = _run(stage, candidate, nbytes, f"load-{turn}", saves=0)
                measured.loads_s.append(max(run["load_s"] for run in runs))
    except MeasurementError as error:
        measured.failure = str(error)
    return measured


def _run(
    stage: Stage,
    candidate: Candidate,
    nbytes: float,
    name: str,
    *,
    saves: int,
    between: int = _BETWEEN,
    after: int = _BETWEEN,
    checkpoints: str = "",
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs the ranks once and returns the measurements of each rank. If `saves` is 0, the ranks
    load a checkpoint instead of saving."""
    results = stage.directory / name
    results.mkdir()
    program, *words = candidate.launcher
    numbers = {
        "ranks": RANKS,
        "width": math.isqrt(round(nbytes / _BYTES_PER_WEIGHT / _SQUARE_LAYERS)),
        "batch": BATCH,
        "saves": saves,
        "between": between,
        "after": after,
    }
    process = stage.start(
        name,
        [
            *(beside_python(program), *words),
            *("--saver", candidate.saver, "--strategy", candidate.strategy),
            *("--checkpoints", checkpoints or str(stage.directory / "checkpoints")),
            *("--results", str(results)),
            *(word for key, value in numbers.items() for word in (f"--{key}", str(value))),
            *(() if saves else ("--load",)),
        ],
        environment,
    )
    stage.finish(process, timeout_s=_TIMEOUT_S)
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _row(candidate: Candidate, measured: Measured, nbytes: float) -> Row:
    cells: dict[str, str] = {}
    if measured.pauses_s:
        cells |= {
            "step s": f"{statistics.median(measured.step_s):.3f}",
            "pause s": f"{statistics.median(measured.pauses_s):.3f}",
            "longest pause s": f"{max(measured.pauses_s):.3f}",
            "lost s": f"{statistics.median(measured.lost_s):.2f}",
            "write GB/s": _rate(nbytes, measured.written_s),
        }
    if measured.loads_s:
        cells["load GB/s"] = _rate(nbytes, measured.loads_s)
    return Row(
        name=candidate.name,
        command=candidate.command,
        cells=cells,
        samples={
            "step_s": measured.step_s,
            "pause_s": measured.pauses_s,
            "lost_s": measured.lost_s,
            "written_s": measured.written_s,
            "load_s": measured.loads_s,
        },
        failure=measured.failure,
    )


def _rate(nbytes: float, seconds: Sequence[float]) -> str:
    return f"{nbytes / statistics.median(seconds) / 1e9:.2f}"


def _read_files(directory: Path) -> None:
    """Reads the files, so that they are in the page cache. Shoal drops the files that it writes
    from the page cache, but DCP does not."""
    buffer = bytearray(_CHUNK)
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _memory_copies(nbytes: float) -> list[float]:
    """Returns the duration of each of several copies of `nbytes` bytes, in seconds. A system that
    copies the state before it continues cannot have a shorter pause."""
    source, target = bytearray(round(nbytes)), bytearray(round(nbytes))
    found = []
    for _ in range(_SAVES):
        begun = time.perf_counter()
        memoryview(target)[:] = source
        found.append(time.perf_counter() - begun)
    return found


def _raw_disk(nbytes: float) -> tuple[list[float], list[float]]:
    """Returns the durations, in seconds, of several writes and reads of a file of this size."""
    chunk = os.urandom(_CHUNK)
    writes_s, reads_s = [], []
    with Stage() as stage:
        path = stage.directory / "raw"
        for _ in range(_RAW_ROUNDS):
            begun = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _ in range(math.ceil(nbytes / _CHUNK)):
                    file.write(chunk)
                os.fsync(file.fileno())
            writes_s.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                buffer = bytearray(_CHUNK)
                while file.readinto(buffer):
                    pass
            reads_s.append(time.perf_counter() - begun)
            path.unlink()
    return writes_s, reads_s


def _uploads(nbytes: float) -> list[Row]:
    """Returns rows for the upload of a checkpoint of this size by Shoal, and for the upload of its
    files by the object store's client alone."""
    candidate = CANDIDATES[0]
    shoal_s: list[float] = []
    alone_s: list[float] = []
    failure = ""
    try:
        with Stage() as stage:
            environment = _s3_server(stage)
            for turn in range(_RAW_ROUNDS):
                staging = stage.directory / f"staging-{turn}"
                run = _run(
                    stage,
                    candidate,
                    nbytes,
                    f"upload-{turn}",
                    saves=_WARM_UP_SAVES + 1,
                    between=_BETWEEN_UPLOADS,
                    after=0,
                    checkpoints=f"s3://{_BUCKET}/run-{turn}",
                    environment={**environment, "SHOAL_STAGING_DIR": str(staging)},
                )
                if len(run[0]["written_s"]) != _WARM_UP_SAVES + 1:
                    raise MeasurementError("not all checkpoints were uploaded")
                shoal_s.append(run[0]["written_s"][-1])
                alone_s.append(_copied_s(staging, f"{_BUCKET}/alone-{turn}", environment))
    except (MeasurementError, OSError) as error:  # the other rows are still worth having
        failure = str(error)
    return [
        Row(
            name=name,
            command=command,
            cells={"write GB/s": _rate(nbytes, seconds)} if seconds else {},
            samples={"written_s": seconds},
            failure=failure,
        )
        for name, command, seconds in (
            ("shoal, ddp, upload to S3", candidate.command, shoal_s),
            ("the S3 client alone", "s3fs: put(checkpoint, recursive=True)", alone_s),
        )
    ]


def _s3_server(stage: Stage) -> dict[str, str]:
    """Starts moto's S3 server, creates a bucket, and returns the environment variables that clients
    of the server need."""
    port = free_port()
    stage.start("moto", [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)])
    stage.wait_until("moto's S3 server", lambda: listens(port), timeout_s=60)
    environment = {**_KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    _client(environment).mkdir(_BUCKET)
    return environment


def _client(environment: dict[str, str]) -> Any:
    import fsspec

    return fsspec.filesystem(
        "s3",
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
    )


def _copied_s(staging: Path, destination: str, environment: dict[str, str]) -> float:
    """Returns the seconds that the object store's client alone needs to copy the checkpoint."""
    found = list(staging.rglob("step-*"))
    if len(found) != 1:
        raise MeasurementError(f"expected one checkpoint in {staging}, found {len(found)}")
    client = _client(environment)
    begun = time.perf_counter()
    client.put(str(found[0]), destination, recursive=True)
    return time.perf_counter() - begun


def _verdict(measured: Sequence[tuple[Candidate, Measured]], copy_s: float) -> str:
    judged = [_judged(*each, measured) for each in measured if each[0].saver == "shoal"]
    return f"Measured: {'; '.join(judged)}. A copy of the state alone takes {copy_s:.3f} s."


def _judged(
    candidate: Candidate, own: Measured, measured: Sequence[tuple[Candidate, Measured]]
) -> str:
    if not own.pauses_s:
        return f"{candidate.strategy} not measured"
    pause = statistics.median(own.pauses_s)
    theirs = [
        statistics.median(each.pauses_s)
        for peer, each in measured
        if peer.saver != "shoal" and peer.strategy == candidate.strategy and each.pauses_s
    ]
    limit = min([ALLOWED_S, *theirs])
    compared = f", DCP's best {min(theirs):.3f} s" if theirs else ""
    return (
        f"{candidate.strategy} {pause:.3f} s{compared} "
        f"({'reached' if pause <= limit else 'not reached'})"
    )
