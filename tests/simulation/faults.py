"""Injects a scenario's faults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal_coordinator.membership.model.events import StopRequested

from tests.simulation.scenario import (
    CoordinatorAway,
    Dies,
    Drains,
    Fault,
    JobStops,
    Joins,
    Parted,
    SlowWrites,
    Stops,
    Torn,
)
from tests.simulation.scheduler import Killed

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.rooms import Meeting, Room
    from tests.simulation.world import World

_NOTICED_LATE_S = 0.05
"""Virtual seconds until a rank notices a fault of its device. This is longer than the messages of a
step take."""


class Faults:
    """The faults of one run. Injects each at its moment."""

    def __init__(self, world: World, faults: Iterable[Fault]) -> None:
        self._world = world
        self._at: dict[tuple[str, int], list[Fault]] = {}
        self._torn: dict[tuple[int, int], Torn] = {}
        self._open: dict[int, Torn] = {}
        self._slow: dict[str, int] = {}
        for fault in faults:
            if isinstance(fault, Torn):
                self._torn[fault.generation, fault.collective] = fault
            elif isinstance(fault, SlowWrites):
                self._slow[fault.who] = fault.seconds
            else:
                self._at.setdefault((fault.who, fault.point), []).append(fault)

    # --------------------------------------------------------------------------------------- points

    def at_point(self, process: Process) -> None:
        """Injects the faults of the point that `process` has reached. Raises Killed if `process`
        dies."""
        for fault in self._at.pop((process.name, process.points), []):
            self._happen(fault, process)
        if process.dead:
            raise Killed

    def _happen(self, fault: Fault, process: Process) -> None:
        world = self._world
        match fault:
            case Dies():
                process.die(f"at point {fault.point}")
            case Stops():
                world.note(f"{process.name} stands still for {fault.seconds} s")
                world.stop_for(process, fault.seconds)
            case Drains():
                process.drain()
            case Joins() if world.scheduler.over is None:
                # otherwise all processes, and so the run, have just ended
                world.start_process()
            case JobStops():
                world.note("the job is stopped")
                if not world.coordinator.away:
                    world.stopped_at = (
                        world.stopped_at if world.stopped_at is not None else world.scheduler.now
                    )
                world.coordinator.submit(StopRequested(reason="a person stopped it"))
            case Parted():
                world.note(
                    f"{fault.one} is cut off from {' '.join(fault.others)} for {fault.seconds} s"
                )
                world.network.cut(fault.one, fault.others, fault.seconds)
            case CoordinatorAway() if not world.coordinator.away:
                world.note(f"the coordinator is away for {fault.seconds} s")
                world.coordinator.go_away()
                world.absences.append((world.scheduler.now, world.scheduler.now + fault.seconds))
                world.scheduler.after(fault.seconds, world.coordinator.come_back)

    def seconds_of_write(self, process: Process) -> int:
        """Returns how long a write by `process` takes, in seconds."""
        return self._slow.get(process.name, 0)

    # ---------------------------------------------------------------------------------- collectives

    def meeting(self, room: Room, meeting: Meeting) -> Meeting:
        """Marks a collective that begins as torn if the scenario says so."""
        torn = self._torn.pop((room.world.generation_of(room.name), meeting.number), None)
        if torn is not None:
            meeting.torn = True
            self._open[id(meeting)] = torn
        return meeting

    def before_contributing(self, room: Room, meeting: Meeting, process: Process) -> None:
        """Kills `process` if it is to die before it enters the collective. Raises Killed then."""
        torn = self._open.get(id(meeting))
        if torn is not None and not torn.entered and torn.dies == process.name:
            process.die(f"before collective {meeting.number} of {room.name}")
            raise Killed

    def tear(self, room: Room, meeting: Meeting) -> None:
        """Delivers a collective's result to some ranks and then ends the group. All ranks have
        entered it."""
        torn = self._open.pop(id(meeting))
        world = self._world
        world.note(f"{torn} ({meeting.kind.value} of {room.name})")
        sides = list(room.sides.values())
        for side in sides:
            if side.process.name in torn.got:
                room.deliver(meeting, side.rank)
        for side in sides:
            if side.process.name == torn.dies:
                side.process.die(f"in collective {meeting.number} of {room.name}")
        for side in sides:
            if side.process.name not in (*torn.got, torn.dies):
                if world.scenario.devices and torn.dies is None:
                    # kernels notice nothing, and hosts notice later
                    meeting.works[side.rank].spins = True
                    world.scheduler.after(
                        _NOTICED_LATE_S, lambda side=side: side.notice("connection reset by peer")
                    )
                else:
                    side.notice("connection reset by peer")
