"""Environment of a run, as seen by its agent: either the run's own cluster (`standalone`), or a
coordinator shared with other launchers (`nodes`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Protocol

from shoal_common.errors import PreconditionError
from shoal_common.formats.runs import Run

if TYPE_CHECKING:
    from shoal.launcher.clusters.cluster import StartService
    from shoal.launcher.run.reporter import ExitReporter
    from shoal.launcher.workers.environment import NodePlacement


MACHINE_REFUSED: Final = "MACHINE_REFUSED"
"""Reason of the error raised if a job refuses a machine."""


class RunCompletedError(PreconditionError):
    """Raised if the requested run has already completed. This is not a failure; there is nothing to
    do."""

    default_reason = "RUN_ENDED"


class Ending(Enum):
    """Outcome of a run at this launcher, as sent to the other launchers."""

    FINISHED = auto()
    """The script finished."""
    FAILED = auto()
    STOPPED = auto()
    """A signal ended the run, or its workers were asked to leave, evicted or killed. This launcher
    leaves; the job may continue elsewhere."""


class Site(Protocol):
    """Environment of a run: its coordinator, and the launchers on other machines, if any."""

    coordinator: str
    """Address of the coordinator (host:port), passed to the workers."""
    run: Run | None
    """The run of the job, known once the site is open; None if the job can have only one run."""

    def begin(self, start_service: StartService) -> None:
        """Starts slow operations. Called first, on the event loop's thread. `start_service`: starts
        processes of parameter servers."""
        ...

    async def open(self, launcher_id: str) -> ExitReporter:
        """Waits until the coordinator is reachable and knows the job. Raises ShoalError, or
        RunCompletedError if the run has already completed."""
        ...

    async def keep(self) -> None:
        """Restarts services of the run's own cluster that die, or watches for a stop by another
        launcher, until cancelled. Called once the site is open. Raises ShoalError if the run must
        end for all launchers."""
        ...

    async def place(self, *, again: bool) -> NodePlacement:
        """Returns this launcher's placement (node rank, number of nodes, master address) for the
        next start of all its workers. Waits for the other launchers. May be called before the site
        is open. Raises ShoalError.

        `again`: True if the other launchers must restart their workers too.
        """
        ...

    async def moved(self) -> None:
        """Waits until launchers have joined or left. The result of the last `place()` is then no
        longer valid."""
        ...

    def fail(self, reason: str) -> None:
        """Tells the other launchers that the job has failed on this machine, and therefore
        everywhere. Blocks for a few seconds at most; never raises an error."""
        ...

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        """Returns the status page of the run with its data included; None if the site has no page
        or the coordinator does not respond. Called once the site is open. Blocks for a few seconds
        at most.

        `known`: values of the job that the coordinator no longer has once the members have left.
        The entry "history" is used only if the coordinator recorded hardly any losses, because the
        run took only a few seconds."""
        ...

    def close(self, ending: Ending) -> None:
        """Leaves the job and stops everything that the site has started. Blocks. Raises
        ShoalError."""
        ...
