"""A scenario: what is trained, by how many ranks, and everything that goes wrong. As text it can be
read, sent, kept and run again.

    zero3, loop clip, 3 ranks, schedule 17
    b dies at point 31
    at point 12 of a: one more joins
    collective 23 of generation 1: c dies, a got it
    collective -1 of step 4: connections break, a b got it

Members are a, b, c, ... in the order in which they start; those that come later, and replacements,
go on in that order. A *point* of a member is a place where its script waits, or passes a failpoint;
they are counted from 1. Collectives are counted over all groups of one generation, in the order in
which they begin; or over those of one step of the first generation, -1 being its last. `schedule`
is the seed of every choice that nothing else says: who runs next, and how long messages take.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Dies:
    """A process is killed."""

    who: str
    point: int
    pattern: ClassVar[str] = r"(?P<who>\w+) dies at point (?P<point>\d+)"

    def __str__(self) -> str:
        return f"{self.who} dies at point {self.point}"


@dataclass(frozen=True, kw_only=True)
class Stops:
    """A process stands still (SIGSTOP): all its threads. For good, if `seconds` is more than its
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
    """A process gets SIGTERM."""

    who: str
    point: int
    pattern: ClassVar[str] = r"(?P<who>\w+) gets SIGTERM at point (?P<point>\d+)"

    def __str__(self) -> str:
        return f"{self.who} gets SIGTERM at point {self.point}"


@dataclass(frozen=True, kw_only=True)
class Joins:
    """One more process starts."""

    who: str
    point: int
    pattern: ClassVar[str] = r"at point (?P<point>\d+) of (?P<who>\w+): one more joins"

    def __str__(self) -> str:
        return f"at point {self.point} of {self.who}: one more joins"


@dataclass(frozen=True, kw_only=True)
class JobStops:
    """Someone asks that the job stops."""

    who: str
    point: int
    pattern: ClassVar[str] = r"at point (?P<point>\d+) of (?P<who>\w+): the job is stopped"

    def __str__(self) -> str:
        return f"at point {self.point} of {self.who}: the job is stopped"


@dataclass(frozen=True, kw_only=True)
class CoordinatorAway:
    """The coordinator ends, and is started again later."""

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
    """Nothing passes between one process and some others for a while. The coordinator and the store
    reach all of them."""

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
    """What a process writes to the disk takes so long."""

    who: str
    seconds: int
    point: int = 0
    pattern: ClassVar[str] = r"writes of (?P<who>\w+) take (?P<seconds>\d+) s"

    def __str__(self) -> str:
        return f"writes of {self.who} take {self.seconds} s"


@dataclass(frozen=True, kw_only=True)
class Torn:
    """A collective ends with the group: some ranks got its result, others did not."""

    generation: int = 1
    step: int | None = None
    """None: of the generation; else `collective` is counted within this step of the run without
    faults, -1 being its last."""
    collective: int
    dies: str | None
    """None: nobody does, connections break."""
    entered: bool = True
    """Who dies had given its part; else nobody can have the result."""
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
"""Strategies that numbered schedules draw from. A number means another schedule when this list
changes."""
ALL_STRATEGIES = (*STRATEGIES, "pipeline")
DIVIDED = ("hybrid", "pipeline")
"""Several ranks hold a replica of the model between them, where their number is even."""
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
"""With a loop that only partitions are tried on: one of each operation between steps."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run."""

    strategy: str = "ddp"
    loop: str = "flat"
    ranks: int = 3
    replaced: bool = False
    """The launcher starts another process for one that dies."""
    devices: bool = False
    """Within a step what ranks compute waits for collectives, and the ranks themselves do not, as
    where tensors lie on devices."""
    steps: int = 5
    """Of an epoch; there are two."""
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
        """Some processes cannot reach others for a while."""
        return any(isinstance(fault, Parted) for fault in self.faults)

    def without_faults(self) -> Scenario:
        """The run that it must end like."""
        return dataclasses.replace(self, faults=(), replaced=False, devices=False, schedule=0)


def parse(text: str) -> Scenario:
    """Reads what `str` of a scenario gives. Lines that begin with # are comments. Raises
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
