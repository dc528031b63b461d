"""Scenarios: the strategy, the loop, the number of ranks, and all faults. Their text form can be
read, shared, stored and run again.

    zero3, loop clip, 3 ranks, schedule 17
    b dies at point 31
    at point 12 of a: one more joins
    collective 23 of generation 1: c dies, a got it
    collective -1 of step 4: connections break, a b got it

Members are named a, b, c, ... in the order in which they start, joiners and replacements included.
A *point* of a member is a place where its script waits or passes a failpoint, counted from 1.
Collectives are counted over all groups of one generation in the order in which they begin, or
within one step of the first generation, where -1 is the last. `schedule` seeds every other choice:
which thread runs next and how long messages take.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Dies:
    """Kills a process."""

    who: str
    point: int
    pattern: ClassVar[str] = r"(?P<who>\w+) dies at point (?P<point>\d+)"

    def __str__(self) -> str:
        return f"{self.who} dies at point {self.point}"


@dataclass(frozen=True, kw_only=True)
class Stops:
    """Stops all threads of a process (SIGSTOP). The stop is final if `seconds` exceeds its
    lease."""

    who: str
    point: int
    seconds: int
    pattern: ClassVar[str] = (
        r"(?P<who>\w+) stands still at point (?P<point>\d+) for (?P<seconds>\d+) s"
    )

    def __str__(self) -> str:
        return f"{self.who} stands still at point {self.point} for {self.seconds} s"


@dataclass(frozen=True, kw_only=True)
class Drains:
    """Sends SIGTERM to a process."""

    who: str
    point: int
    pattern: ClassVar[str] = r"(?P<who>\w+) gets SIGTERM at point (?P<point>\d+)"

    def __str__(self) -> str:
        return f"{self.who} gets SIGTERM at point {self.point}"


@dataclass(frozen=True, kw_only=True)
class Joins:
    """Starts one more process."""

    who: str
    point: int
    pattern: ClassVar[str] = r"at point (?P<point>\d+) of (?P<who>\w+): one more joins"

    def __str__(self) -> str:
        return f"at point {self.point} of {self.who}: one more joins"


@dataclass(frozen=True, kw_only=True)
class JobStops:
    """Requests that the job stop."""

    who: str
    point: int
    pattern: ClassVar[str] = r"at point (?P<point>\d+) of (?P<who>\w+): the job is stopped"

    def __str__(self) -> str:
        return f"at point {self.point} of {self.who}: the job is stopped"


@dataclass(frozen=True, kw_only=True)
class CoordinatorAway:
    """Stops the coordinator and restarts it later."""

    who: str
    point: int
    seconds: int
    pattern: ClassVar[str] = (
        r"at point (?P<point>\d+) of (?P<who>\w+): the coordinator is away for (?P<seconds>\d+) s"
    )

    def __str__(self) -> str:
        return f"at point {self.point} of {self.who}: the coordinator is away for {self.seconds} s"


@dataclass(frozen=True, kw_only=True)
class Parted:
    """Cuts one process off from some others for a while. All of them still reach the coordinator
    and the store."""

    who: str
    point: int
    one: str
    others: tuple[str, ...]
    seconds: int
    pattern: ClassVar[str] = (
        r"at point (?P<point>\d+) of (?P<who>\w+): (?P<one>\w+) is cut off from (?P<others>[\w ]+) "
        r"for (?P<seconds>\d+) s"
    )

    def __str__(self) -> str:
        return (
            f"at point {self.point} of {self.who}: {self.one} is cut off from "
            f"{' '.join(self.others)} for {self.seconds} s"
        )


@dataclass(frozen=True, kw_only=True)
class SlowWrites:
    """Makes a process's writes to disk slow."""

    who: str
    seconds: int
    point: int = 0
    pattern: ClassVar[str] = r"writes of (?P<who>\w+) take (?P<seconds>\d+) s"

    def __str__(self) -> str:
        return f"writes of {self.who} take {self.seconds} s"


@dataclass(frozen=True, kw_only=True)
class Torn:
    """Ends the group during a collective: some ranks got its result, others did not."""

    generation: int = 1
    step: int | None = None
    """Step of the run without faults within which `collective` counts, -1 being its last. None:
    `collective` counts within the generation."""
    collective: int
    dies: str | None
    """Name of the process that dies. None: the connections break without a death."""
    entered: bool = True
    """True if the process that dies had entered the collective; otherwise no rank can have the
    result."""
    got: tuple[str, ...] = ()
    pattern: ClassVar[str] = (
        r"collective (?P<collective>-?\d+) of (generation (?P<generation>\d+)|step (?P<step>\d+)): "
        r"(?P<end>\w+ dies before it|\w+ dies|connections break), (?P<got>.+) got it"
    )

    def __str__(self) -> str:
        end = (
            "connections break"
            if self.dies is None
            else f"{self.dies} dies" + ("" if self.entered else " before it")
        )
        where = f"generation {self.generation}" if self.step is None else f"step {self.step}"
        return (
            f"collective {self.collective} of {where}: {end}, {' '.join(self.got) or 'nobody'} "
            "got it"
        )


Fault: TypeAlias = (
    Dies | Stops | Drains | Joins | JobStops | CoordinatorAway | Parted | SlowWrites | Torn
)
_KINDS: tuple[type[Fault], ...] = (
    Dies,
    Stops,
    Drains,
    Joins,
    JobStops,
    CoordinatorAway,
    Parted,
    SlowWrites,
)

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "hybrid", "local_sgd")
"""Strategies from which numbered schedules draw. A change to this list changes the schedule that
belongs to a seed."""
ALL_STRATEGIES = (*STRATEGIES, "pipeline")
DIVIDED = ("hybrid", "pipeline")
"""Strategies in which several ranks share a replica if the number of ranks is even."""
LOOPS = (
    "flat",
    "micro-batches",
    "clip",
    "scaler",
    "scheduler",
    "EMA",
    "evaluate",
    "save",
    "break",
    "enumerate",
    "plain",
)
SAVING = ("save", "operations")
"""Loops that save checkpoints."""
ALL_LOOPS = (*LOOPS, "operations")
"""All loops, including `operations`, which is used with partitions only and performs each operation
between steps."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The description of one run."""

    strategy: str = "ddp"
    loop: str = "flat"
    ranks: int = 3
    replaced: bool = False
    """True if the launcher replaces processes that die."""
    devices: bool = False
    """True if, as on GPUs, only computations wait for collectives within a step and hosts do
    not."""
    steps: int = 5
    """Steps per epoch. A run has two epochs."""
    schedule: int = 0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        head = [self.strategy, f"loop {self.loop}", f"{self.ranks} ranks"]
        head += [f"{self.steps} steps"] if self.steps != Scenario.steps else []
        head += ["replaced"] if self.replaced else []
        head += ["on devices"] if self.devices else []
        return "\n".join([", ".join([*head, f"schedule {self.schedule}"]), *map(str, self.faults)])

    @property
    def parted(self) -> bool:
        """True if the scenario has partitions."""
        return any(isinstance(fault, Parted) for fault in self.faults)

    def without_faults(self) -> Scenario:
        """Returns the scenario whose result this one must reproduce."""
        return dataclasses.replace(self, faults=(), replaced=False, devices=False, schedule=0)


def parse(text: str) -> Scenario:
    """Parses the text form of a scenario. Lines that begin with # are comments. Raises
    ValueError."""
    head, *rest = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    found = re.fullmatch(
        r"(?P<strategy>\w+), loop (?P<loop>[\w-]+), (?P<ranks>\d+) ranks(, (?P<steps>\d+) "
        r"steps)?(?P<replaced>, replaced)?"
        r"(?P<devices>, on devices)?, schedule (?P<schedule>\d+)",
        head,
    )
    if found is None:
        raise ValueError(f"{head!r} is no first line of a scenario, such as {str(Scenario())!r}")
    return Scenario(
        strategy=found["strategy"],
        loop=found["loop"],
        ranks=int(found["ranks"]),
        replaced=found["replaced"] is not None,
        devices=found["devices"] is not None,
        steps=int(found["steps"] or Scenario.steps),
        schedule=int(found["schedule"]),
        faults=tuple(_parse_fault(line) for line in rest),
    )


def _parse_fault(line: str) -> Fault:
    if (torn := re.fullmatch(Torn.pattern, line)) is not None:
        end, got = torn["end"], torn["got"]
        return Torn(
            generation=int(torn["generation"] or 1),
            step=None if torn["step"] is None else int(torn["step"]),
            collective=int(torn["collective"]),
            dies=None if end == "connections break" else end.split()[0],
            entered=not end.endswith("before it"),
            got=() if got == "nobody" else tuple(got.split()),
        )
    for kind in _KINDS:
        if (found := re.fullmatch(kind.pattern, line)) is not None:
            return kind(**{name: _field(name, value) for name, value in found.groupdict().items()})
    raise ValueError(f"{line!r} is no fault of a scenario")


def _field(name: str, value: str) -> str | int | tuple[str, ...]:
    if name in ("who", "one"):
        return value
    return tuple(value.split()) if name == "others" else int(value)
