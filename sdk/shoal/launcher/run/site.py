"""Location of a run from its agent's perspective: a cluster of its own (`standalone`), or a
coordinator shared with others (`nodes`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from shoal_common.errors import PreconditionError
from shoal_common.formats.runs import Run

if TYPE_CHECKING:
    from shoal.launcher.clusters.cluster import StartService
    from shoal.launcher.run.reporter import ExitReporter
    from shoal.launcher.workers.environment import NodePlacement


class RunCompletedError(PreconditionError):
    """The requested run has already completed: nothing is left to do, and nothing is wrong."""

    default_reason = "RUN_ENDED"


class Ending(Enum):
    """Outcome of a run as reported to other launchers."""

    FINISHED = auto()
    """The script finished."""
    FAILED = auto()
    STOPPED = auto()
    """Ended by a signal, or because its workers were asked to leave, evicted or killed: this
    launcher goes, and the job may continue elsewhere."""


class Site(Protocol):
    """Location of a run, as described in the module."""

    coordinator: str
    """host:port passed to the workers."""
    run: Run | None
    """Run of the job, once the site is open; None if the job has no other."""

    def begin(self, start_service: StartService) -> None:
        """Starts slow operations. Called first, on the loop's thread. `start_service`: starts
        processes of parameter servers."""
        ...

    async def open(self, launcher_id: str) -> ExitReporter:
        """Waits until the coordinator is reachable and knows the job. Raises ShoalError;
        RunCompletedError if everything is done."""
        ...

    async def keep(self) -> None:
        """Maintains the site until cancelled; called once it is open. Raises ShoalError if the run
        must end for all launchers."""
        ...

    async def place(self, *, again: bool) -> NodePlacement:
        """Returns this launcher's place for the next start of all its workers; may be called before
        the site is open. Waits for other launchers, whose workers must restart too if `again`.
        Raises ShoalError."""
        ...

    async def moved(self) -> None:
        """Returns when the last place is no longer valid because launchers came or left."""
        ...

    def fail(self, reason: str) -> None:
        """Informs the other launchers that the job has failed here, and so on all machines. Blocks
        for at most some seconds; never raises."""
        ...

    def saved_page(self, known: Mapping[str, int]) -> str | None:
        """Returns the status page of the run with its data in it; None if the site has none or it
        does not answer. `known`: values of the job that its coordinator no longer has when its
        members have left. Blocks for some seconds at most; called once the site is open."""
        ...

    def close(self, ending: Ending) -> None:
        """Leaves the job and ends everything that the site started. Blocks. Raises ShoalError."""
        ...
