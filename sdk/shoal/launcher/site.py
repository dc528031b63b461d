"""Where a run takes place, as its agent sees it: on a cluster of its own (`standalone`), or at a
coordinator shared by others (`nodes`)."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from shoal_common.errors import PreconditionError
from shoal_common.runs import Run

if TYPE_CHECKING:
    from shoal.launcher.cluster import StartService
    from shoal.launcher.environment import NodePlacement
    from shoal.launcher.reporter import ExitReporter


class RunCompletedError(PreconditionError):
    """The run that was asked for has come to its end already: there is nothing left to do, and
    nothing is wrong."""

    default_reason = "RUN_ENDED"


class Ending(Enum):
    """How a run ended, towards other launchers."""

    FINISHED = auto()
    """The script came to its end."""
    FAILED = auto()
    STOPPED = auto()
    """By a signal, or because its workers were asked to leave, put out or killed: this launcher
    goes, the job may go on elsewhere."""


class Site(Protocol):
    """See the module."""

    coordinator: str
    """host:port, told to the workers."""
    run: Run | None
    """The job's run, once the site is open; None: the job has no other."""

    def begin(self, start_service: StartService) -> None:
        """Starts what takes time. Called first, on the loop's thread. `start_service` starts
        processes of parameter servers."""
        ...

    async def open(self, launcher_id: str) -> ExitReporter:
        """Waits until the coordinator is reachable and the job is known to it. Raises ShoalError;
        RunCompletedError where all is done."""
        ...

    async def keep(self) -> None:
        """Looks after the site until cancelled; called once it is open. Raises ShoalError when the
        run is to end for all launchers."""
        ...

    async def place(self, *, again: bool) -> NodePlacement:
        """This launcher's place at the next start of all its workers; may be called before the site
        is open. Waits for other launchers, whose workers must start anew too if `again`. Raises
        ShoalError."""
        ...

    async def moved(self) -> None:
        """Returns when the place given last does not hold any more, since launchers came or
        went."""
        ...

    def fail(self, reason: str) -> None:
        """The job has failed here, and on all machines: tells the other launchers. Blocks for some
        seconds at most; never raises."""
        ...

    def close(self, ending: Ending) -> None:
        """Takes leave, and ends whatever the site started. Blocks. Raises ShoalError."""
        ...
