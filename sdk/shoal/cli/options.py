"""Flags shared by several commands."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from shoal.launcher.machines.notices import NoticeSource

Script = Annotated[
    str, typer.Argument(help="Training script; with -m a module.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
]
Module = Annotated[
    bool,
    typer.Option(
        "--module",
        "-m",
        help="SCRIPT is a module, run as `python -m` does.",
        envvar="PET_MODULE",
        show_envvar=False,
    ),
]
Servers = Annotated[
    int,
    typer.Option(
        help="Number of parameter servers, for async_sgd and sparse tables. By default, a run's "
        "own cluster starts one if the script asks for it."
    ),
]
ServerBackups = Annotated[
    int,
    typer.Option(
        help="Number of backups of each parameter server, 0 or 1. With one, a server that dies is "
        "replaced at once.",
        min=0,
        max=1,
    ),
]
MaxServers = Annotated[
    int,
    typer.Option(
        help="Maximum number of parameter servers. Those started later receive a share while "
        "training continues. Default: --servers.",
        min=0,
    ),
]
RecordDirectory = Annotated[
    Path | None,
    typer.Option(
        "--record-dir",
        help="Record every sample index and commit in this directory, as JSON lines.",
        show_default=False,
    ),
]
Metrics = Annotated[
    bool,
    typer.Option(
        help="Serve Prometheus metrics from the workers, at SHOAL_METRICS_LISTEN or any loopback "
        "port."
    ),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm/--no-warm",
        help="Fork workers from a process that has imported torch; --no-warm starts a fresh "
        "interpreter for each.",
        envvar="SHOAL_WARM",
    ),
]
PreemptionNotice = Annotated[
    NoticeSource,
    typer.Option(
        help="Cloud whose notices make this machine's workers leave before the machine stops. "
        "auto: the cloud that the firmware names, if any.",
        envvar="SHOAL_PREEMPTION_NOTICE",
    ),
]
HealthChecks = Annotated[
    bool,
    typer.Option(
        "--health-checks",
        help="Check this machine before its workers start and before one is replaced, as `shoal "
        "health` does. The job refuses a machine that fails.",
        envvar="SHOAL_HEALTH_CHECKS",
    ),
]
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress",
        help="Show the progress of an elastic run: a bar on a terminal, otherwise a line on "
        "standard error every 30 s.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png|FILE.svg",
        help="Draw the loss, other reported numbers and the throughput over time to this file at "
        "the end, with faults, joins and leaves. May be a URL (s3://bucket/run.svg). Needs "
        "matplotlib: the extra [plot].",
        show_default=False,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help="How often workers are restarted: those of a plain script all together, elastic ones "
        "one by one. Default: 0, or 3 for elastic workers that were killed or evicted "
        "without raising an exception.",
        envvar="PET_MAX_RESTARTS",
        show_envvar=False,
        show_default=False,
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        help="Minimum number of workers to continue training with once it has begun. Default: 1; "
        "with --nnodes MIN:MAX the workers of MIN machines.",
        show_default=False,
    ),
]
FailFast = Annotated[
    bool,
    typer.Option(
        "--fail-fast/--no-fail-fast",
        help="End the job if an elastic worker raises an exception and is not restarted. "
        "Otherwise the others continue, and the exit status is that worker's.",
    ),
]
FailOnStop = Annotated[
    bool,
    typer.Option(
        "--fail-on-stop",
        help="Exit with status 75 (unfinished) instead of 0 if `shoal stop` ended the run.",
    ),
]
FromScratch = Annotated[
    bool,
    typer.Option(
        "--allow-restart-from-scratch",
        help="Begin again at step 0 if all workers with the training state have died and the "
        "script loads no checkpoint. Otherwise that is an error.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the coordinator. Default: that of the newest cluster on this machine.",
        envvar="SHOAL_COORDINATOR",
    ),
]
Job = Annotated[
    str | None,
    typer.Option(help="Id of the job. Default: the only job.", envvar="SHOAL_JOB_ID"),
]
PastRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A past run of this machine, JOB/NUMBER or a job, as `shoal history` lists them. "
        "Default: the newest, if no cluster is running.",
        show_default=False,
    ),
]
RankOrServer = Annotated[
    str,
    typer.Argument(
        metavar="RANK|SERVER",
        help="A rank, or the id of a parameter server, as `shoal status` shows them.",
        show_default=False,
    ),
]


# ---------------------------------------------------------- how a command shows itself to a cluster


def _file(flag: str, text: str) -> Any:
    variable = "SHOAL_" + flag.removeprefix("--").replace("-", "_").upper()
    return Annotated[
        Path | None,
        typer.Option(flag, help=f"{text} Default: {variable}.", metavar="FILE", show_default=False),
    ]


_CREDENTIALS: Final = {
    "tls_ca": _file(
        "--tls-ca", "PEM file of the authorities that sign the cluster's certificates; enables TLS."
    ),
    "tls_cert": _file("--tls-cert", "PEM certificate of this caller, if the cluster requires one."),
    "tls_key": _file("--tls-key", "PEM private key of --tls-cert."),
    "token_file": _file(
        "--token-file", "File with the bearer token; SHOAL_TOKEN holds the token itself."
    ),
}


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags for a cluster's credentials to a command. Given flags become environment
    variables of this process, which all settings read and child processes inherit."""

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> None:
        for name in _CREDENTIALS:
            if (path := given.pop(name)) is not None:
                os.environ[f"SHOAL_{name.upper()}"] = str(path.absolute())
        command(*arguments, **given)

    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature.parameters.items()
    ]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _CREDENTIALS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, **_CREDENTIALS}
    return run
