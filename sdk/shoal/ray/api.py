"""`shoal.ray.run`: validates its arguments and converts them to commands for the machines of a Ray
cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError, UnavailableError

from shoal.launcher.clusters.jobs import new_job_id
from shoal.ray import call
from shoal.ray.run_plan import Plan

if TYPE_CHECKING:
    from shoal.ray.supervision import Outcome

_log = logging.getLogger("shoal.ray")

_PLACEMENT: Final = timedelta(minutes=10)
_SHUTDOWN: Final = timedelta(seconds=30)
_ONE_CPU: Final[Mapping[str, float]] = {"CPU": 1}


def run(
    fn_or_script: Callable[..., Any] | str | os.PathLike[str],
    *,
    args: Sequence[Any] = (),
    workers: int | tuple[int, int] = 1,
    resources: Mapping[str, float] = _ONE_CPU,
    workers_per_bundle: int = 1,
    strategy: str = "PACK",
    servers: int = 0,
    server_backups: int = 0,
    server_resources: Mapping[str, float] = _ONE_CPU,
    coordinator: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    placement_timeout: timedelta = _PLACEMENT,
    shutdown_timeout: timedelta = _SHUTDOWN,
) -> dict[int, Any] | int:
    """Trains on a Ray cluster, with Shoal's launchers in the bundles of placement groups. Blocks
    until the run has ended.

    When a machine dies, the other workers continue without it. Ray places the lost processes
    elsewhere, and the workers started there join the run. Ray is initialized if necessary.

    Args:
        fn_or_script: function to call on each worker, or path of a script that exists at this path
            on all machines.
        args: arguments of the function or of the script.
        workers: number of workers. Ray must place all of them before the first one starts; a single
            one is enough to continue. A pair gives the minimum and the maximum: workers above the
            minimum join when Ray has a place for them.
        resources: resources of a bundle, as Ray names them, e.g. {"CPU": 8, "GPU": 1}; by default
            {"CPU": 1}.
        workers_per_bundle: number of workers in one bundle, started by one launcher; `workers` must
            be a multiple of it.
        strategy: Ray's strategy for placing bundles.
        servers: number of parameter servers, for async_sgd, each in its own bundle.
        server_backups: number of backups per parameter server, 0 or 1. Without a backup, a server's
            values are lost if its machine is lost.
        server_resources: resources of a server's bundle; by default {"CPU": 1}.
        coordinator: HOST:PORT of a running coordinator that all machines can reach, used with the
            credentials of this process (SHOAL_TOKEN, ...). None: a coordinator is started on this
            machine, with a new token.
        environment: additional variables for all workers and servers.
        flags: additional flags of `shoal run`, e.g. ("--max-restarts", "2").
        placement_timeout: maximum time for Ray to place the first workers, and maximum time without
            a place for any worker.
        shutdown_timeout: maximum time for workers to leave when this process is interrupted, before
            they are killed.

    Returns:
        For a function, its return values by rank. If a rank's machine died after the function had
            returned, its value is missing, and a log message reports this. For a script, its exit
            status (docs/exit-status.md).

    Raises:
        ConfigurationError: Ray is not installed (RAY_NOT_INSTALLED), or an argument is invalid.
        DeadlineError: Ray has no place for the bundles (RESOURCES_UNAVAILABLE).
        UnavailableError: the run could not complete because of failures of its machines.
        Exception: exception of the function, from the rank that failed first, with a note that
            contains the rank and the traceback.
    """
    if callable(fn_or_script):
        script: tuple[str, ...] = ("--module", "shoal.ray.worker")
        name = getattr(fn_or_script, "__name__", "function")
    else:
        name = os.fspath(fn_or_script)
        script = (name, *map(str, args))
    plan = Plan(
        job_id=new_job_id(name),
        script=script,
        files={},
        workers=workers,
        workers_per_bundle=workers_per_bundle,
        resources=resources,
        strategy=strategy,
        servers=servers,
        server_backups=server_backups,
        server_resources=server_resources,
        environment=environment or {},
        flags=flags,
    )
    if servers and coordinator is not None:
        raise ConfigurationError(
            f"servers={servers} is not supported with coordinator={coordinator!r}, since servers "
            "are started only together with a coordinator; omit coordinator"
        )
    if find_spec("ray") is None:
        raise ConfigurationError(
            "shoal.ray.run requires the package ray, which is not installed; run pip install "
            "'shoal[ray]'",
            reason="RAY_NOT_INSTALLED",
        )
    from shoal.ray.job import Patience, carry_out

    if callable(fn_or_script):
        plan = replace(plan, files={call.CALL: call.packed(fn_or_script, args)})
    patience = Patience(placement=placement_timeout, shutdown=shutdown_timeout)
    outcome = carry_out(plan, coordinator=coordinator, patience=patience)
    return _returned(outcome) if callable(fn_or_script) else _status(outcome)


def _returned(outcome: Outcome) -> dict[int, Any]:
    """Returns the function's results by rank. Raises the exception of the function, or
    UnavailableError."""
    if not outcome.came_to_the_end:
        failure = call.first_failure_in(outcome.failed)
        if failure is None:
            raise _unfinished(outcome)
        failure.error.add_note(
            f"This was raised by rank {failure.rank} in shoal.ray.run:\n{failure.trace}"
        )
        raise failure.error
    values = call.values_in(outcome.finished)
    ranks = {value.rank for value in values}
    missing = sorted(set(range(max((value.world_size for value in values), default=1))) - ranks)
    if missing:
        _log.warning(
            "the run completed, but the return value of rank %s was lost when its machine died",
            ", ".join(map(str, missing)),
        )
    return {value.rank: value.value for value in values}


def _status(outcome: Outcome) -> int:
    """Returns the script's exit status: 0 if it finished, otherwise the status of a launcher whose
    own workers failed. (Other launchers exit with status 1 then.) Raises UnavailableError if the
    run ended early without a failure of the script."""
    if outcome.came_to_the_end:
        return 0
    if not outcome.failed:
        raise _unfinished(outcome)
    return next(
        (ended.status for ended in (*outcome.failed, *outcome.earlier) if ended.has_failed),
        outcome.failed[0].status,
    )


def _unfinished(outcome: Outcome) -> UnavailableError:
    failed = [ended for ended in outcome.failed if ended.has_failed] or outcome.failed
    ends = [
        f"a launcher on {ended.host} ended with status {ended.status} (docs/exit-status.md)"
        for ended in failed
    ]
    return UnavailableError(
        f"the run did not complete: {'; '.join([*ends, *outcome.lost])}. See the output of "
        "workers and launchers above",
        reason="RUN_UNFINISHED",
    )
