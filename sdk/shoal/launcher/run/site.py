"""Environment of a run as its agent sees it: the run's own cluster (`standalone`), or a coordinator
shared with other launchers (`nodes`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from shoal_common.errors import PreconditionError
from shoal_common.formats.runs import Run

if TYPE_CHECKING:
    from shoal.launcher.clusters.cluster import StartService
    from shoal.launcher.run.reporter import ExitReporter
    from shoal.launcher.workers.environment import NodePlacement


MACHINE_REFUSED: Final = "MACHINE_REFUSED"
"""Reason of the error with which a job refuses a machine."""


class RunCompletedError(PreconditionError):
    """The requested run has already completed, so nothing is left to do. This is not a failure."""

    default_reason = "RUN_ENDED"


class Ending(Enum):
    """Outcome of a run as reported to other launchers."""

    FINISHED = auto()
    """The script finished."""
    FAILED = auto()
    STOPPED = auto()
    """The run was ended by a signal, or because its workers were asked to leave, evicted or killed.
    This launcher leaves, and the job may continue elsewhere."""


class Site(Protocol):
    """Environment of a run, with its coordinator and its place among launchers."""

    coordinator: str
    """Address of the coordinator (host:port), passed to the workers."""
    run: Run | None
    """Run of the job, once the site is open; None if the job can have only one."""

    def begin(self, start_service: StartService) -> None:
        """Starts slow operations. Called first, on the loop's thread. `start_service`: function
        that starts processes of parameter servers."""
        ...

    async def open(self, launcher_id: str) -> ExitReporter:
        """Waits until the coordinator is reachable and knows the job. Raises ShoalError, or
        RunCompletedError if the run has already completed."""
        ...

    async def keep(self) -> None:
        """Maintains the site until cancelled. Called once the site is open. Raises ShoalError if
        the run must end for all launchers."""
        ...

    async def place(self, *, again: bool) -> NodePlacement:
        """Returns this launcher's place for the next start of all its workers; may be called before
        the site is open. Waits for other launchers. `again`: True if the other launchers must
        restart their workers too. Raises ShoalError."""
        ...

    async def moved(self) -> None:
        """Waits until the last place is no longer valid because launchers have joined or left."""
        ...

    def fail(self, reason: str) -> None:
        """Informs the other launchers that the job has failed on this machine and therefore
        everywhere. Blocks for at most some seconds; never raises an error."""
        ...

    def saved_page(self, known: Mapping[str, int]) -> str | None:
        """Returns the status page of the run with its data included. Returns None if the site
        has no page or it does not answer. `known`: values of the job that its coordinator no
        longer has after its members have left. Blocks for some seconds at most; called once the
        site is open."""
        ...

    def close(self, ending: Ending) -> None:
        """Leaves the job and ends everything that the site has started. Blocks. Raises
        ShoalError."""
        ...
