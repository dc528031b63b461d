"""Measures whether abandoned collectives write into tensors that are in use again, and how long it
takes to form the next group.

`benchmarks.workers.late_writes` describes a round of the measurement. The ways to abandon a group
(schemes) of torch and of Shoal use this interpreter's torch. `_reconfigure` may need a newer
version, which `make test-torch` installs. torchft uses the torch in the peers' environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.peers import PYTHON, reconfiguring_python, torchft_version
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table

ROUNDS: Final = 100
NUMEL: Final = 4_000_000
TIMEOUT_S: Final = 2.0
_ROUND_S: Final = 30
"""Maximum duration of a round, including its waits."""


def _here() -> tuple[Path, str]:
    return Path(sys.executable), f"torch {metadata.version('torch')}"


def _reconfiguring() -> tuple[Path, str]:
    python, version = reconfiguring_python()
    return python, f"torch {version}"


def _torchft() -> tuple[Path, str]:
    return PYTHON, torchft_version()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to abandon a group and form another."""

    scheme: str
    """Name of the scheme in the worker program."""
    name: str
    environment: Callable[[], tuple[Path, str]]
    """Returns the interpreter to use, and the versions to show in the row's name. Raises
    MeasurementError if the candidate cannot run."""
    ours: bool = False


CANDIDATES: Final = (
    Candidate(scheme="gloo", name="torch's Gloo, formed again by hand", environment=_here),
    Candidate(
        scheme="reconfigure",
        name="torch's Gloo, `_reconfigure`",
        environment=_reconfiguring,
    ),
    Candidate(
        scheme="torchft",
        name="torchft's ProcessGroupGloo",
        environment=_torchft,
    ),
    Candidate(
        scheme="shoal", name="`shoal_gloo`, formed again by hand", environment=_here, ours=True
    ),
    Candidate(
        scheme="shoal-reconfigure",
        name="`shoal_gloo`, `_reconfigure`",
        environment=_reconfiguring,
        ours=True,
    ),
)


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 8 minutes."""
    rounds = 4 if options.quick else ROUNDS
    rows = {candidate: _row(candidate, rounds) for candidate in CANDIDATES}
    return Table(
        key="late-writes",
        title="Collectives in flight when a group is abandoned",
        target="Shoal's groups: no round with changed tensors, none that waited for the timeout",
        method=(
            f"In each round, three processes form a group with a timeout of {TIMEOUT_S:g} s. Rank "
            "2 is stopped (SIGSTOP). The others start one all-reduce (two in every second round) "
            f"of {NUMEL / 1e6:g} million float32 each, which waits for rank 2. After 0.1 s, they "
            "abandon it, form a group of two, and all-reduce 8 numbers there. The time is "
            "measured until the slower of the two has finished this. They then fill the tensors "
            "of the old all-reduces with different numbers. Rank 2 continues and does its part of "
            "the old all-reduces, with the same timeout. *Changed*: rounds in which a survivor "
            "then found that its tensors no longer contained the numbers that it had written. "
            "*Silent*: rounds among these in which `wait()` of all old works returned normally. "
            "*Waited*: rounds in which the next all-reduce took half of the timeout or longer, or "
            "failed. In the first row, the old group is kept, because its destructor would wait "
            "for the timeout."
        ),
        columns=("rounds", "changed", "silent", "waited", "p50 s", "p99 s"),
        rows=tuple(rows.values()),
        verdict=verdict(
            [row for candidate, row in rows.items() if candidate.ours and not row.failure]
        ),
    )


def _row(candidate: Candidate, rounds: int) -> Row:
    found: list[dict[str, Any]] = []
    name, failure = candidate.name, ""
    words = [
        "-m",
        "benchmarks.workers.late_writes",
        f"--scheme={candidate.scheme}",
        f"--rounds={rounds}",
        f"--numel={NUMEL}",
        f"--timeout-s={TIMEOUT_S:g}",
    ]
    try:
        python, version = candidate.environment()
        name += f" ({version})"
        with Stage() as stage:
            output = stage.directory / "rounds.json"
            process = stage.start(candidate.scheme, [str(python), *words, f"--output={output}"])
            try:
                stage.finish(process, timeout_s=_ROUND_S * rounds)
            finally:
                found = _read(output)
    except MeasurementError as error:
        failure = str(error)
    return described(name, " ".join(["python", *words]), found, failure)


def _read(output: Path) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    return rounds


def described(name: str, command: str, rounds: Sequence[dict[str, Any]], failure: str = "") -> Row:
    """Returns the row of a candidate. `rounds`: rounds as measured by the worker. `failure`: reason
    if there are none."""
    if not rounds:
        return Row(name=name, command=command, cells={}, failure=failure)
    times = [one["next_s"] for one in rounds]
    changed = [one for one in rounds if one["changed"]]
    waited = [one for one in rounds if one["failures"] or one["next_s"] >= TIMEOUT_S / 2]
    return Row(
        name=name,
        command=command,
        cells={
            "rounds": str(len(rounds)),
            "changed": str(len(changed)),
            "silent": str(sum(one["silent"] for one in rounds)),
            "waited": str(len(waited)),
            "p50 s": f"{quantile(times, 0.5):.3f}",
            "p99 s": f"{quantile(times, 0.99):.3f}",
        },
        samples={
            "next_s": times,
            "changed": [one["changed"] for one in rounds],
            "in_flight": [one["in_flight"] for one in rounds],
        },
        failure=failure,
    )


def verdict(rows: Sequence[Row]) -> str:
    """Returns a sentence that compares Shoal's rows with the target."""
    judged = [
        f"{row.name} {row.cells['changed']} and {row.cells['waited']} of {row.cells['rounds']} ("
        + ("reached" if row.cells["changed"] == row.cells["waited"] == "0" else "not reached")
        + ")"
        for row in rows
    ]
    return f"Measured: {'; '.join(judged) or 'nothing'}."
