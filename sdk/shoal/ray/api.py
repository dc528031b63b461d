"""`shoal.ray.run`: validates its arguments and converts them to commands for Ray's machines."""

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
from shoal.ray.plan import Plan

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
    """Trains on a Ray cluster: launchers of Shoal in a placement group's bundles. Blocks until the
    run has ended.

    When a machine dies, the other workers go on without it; Ray finds another place for what it
    had, and the worker that is started there joins them. Ray is initialized if it is not.

    Args:
        fn_or_script: a function, which is called on each worker, or the path of a script that all
            machines have there.
        args: of the function, or of the script.
        workers: how many; all have a place before the first starts, and one of them is enough to go
            on. Or the fewest that train, and the most: those above the fewest join when Ray has a
            place for them.
        resources: of a bundle, as Ray names them: {"CPU": 1}, the default, {"CPU": 8, "GPU": 1},
            ...
        workers_per_bundle: workers in one bundle, by one launcher; `workers` is a multiple of it.
        strategy: Ray's, by which bundles are placed.
        servers: parameter servers, for async_sgd, each in a bundle of its own.
        server_backups: 0 or 1 backup for each of them. Without one, what a server has learnt is
            lost with its machine.
        server_resources: of a server's bundle; {"CPU": 1} unless given.
        coordinator: HOST:PORT of one that runs already and that all machines reach; the credentials
            are this process's (SHOAL_TOKEN, ...). None: one is started beside this process, with a
            token that is made for it.
        environment: further variables of all workers and servers.
        flags: further flags of `shoal run`, as in ("--max-restarts", "2").
        placement_timeout: how long Ray may take to place the first workers, and how long it may
            have no place for any.
        shutdown_timeout: how long workers have to leave when this process is interrupted, before
            they are killed.

    Returns:
        Of a function, what it returned, by rank; a rank whose machine died after its end is
        missing, and the log says so. Of a script, its exit status (docs/exit-status.md).

    Raises:
        ConfigurationError: Ray is not installed (RAY_NOT_INSTALLED), or an argument cannot work.
        DeadlineError: Ray has no place for the bundles (RESOURCES_UNAVAILABLE).
        UnavailableError: the run did not come to its end, for what happened to its machines.
        Exception: what the function raised, on the rank where it failed first, with a note that has
            rank and traceback.
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
    """Returns the function's results by rank. Raises its exception, or UnavailableError."""
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
            "the run completed, but the return value of rank %s was lost with its machine",
            ", ".join(map(str, missing)),
        )
    return {value.rank: value.value for value in values}


def _status(outcome: Outcome) -> int:
    """Returns the script's status. Launchers whose own workers did not fail know only that others'
    did (1)."""
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
