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
    str, typer.Argument(help="Training script or, with -m, a module.", show_default=False)
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
        help="Number of parameter servers, which async_sgd and sparse tables use. By default, a "
        "run without --rdzv-endpoint starts one if the script needs it."
    ),
]
ServerBackups = Annotated[
    int,
    typer.Option(
        help="Number of backups of each parameter server, 0 or 1. A backup replaces a server that "
        "dies at once.",
        min=0,
        max=1,
    ),
]
MaxServers = Annotated[
    int,
    typer.Option(
        help="Maximum number of parameter servers. Servers started later take over a share of the "
        "model while training continues. Default: the value of --servers.",
        min=0,
    ),
]
RecordDirectory = Annotated[
    Path | None,
    typer.Option(
        "--record-dir",
        help="Record the indices of all samples and the commits in this directory, as JSON lines.",
        show_default=False,
    ),
]
Metrics = Annotated[
    bool,
    typer.Option(
        help="Serve Prometheus metrics from each worker, at the address in SHOAL_METRICS_LISTEN "
        "or at any loopback port."
    ),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm/--no-warm",
        help="Fork workers from a process that has already imported torch. --no-warm starts a "
        "fresh interpreter for each worker.",
        envvar="SHOAL_WARM",
    ),
]
PreemptionNotice = Annotated[
    NoticeSource,
    typer.Option(
        help="Cloud provider whose preemption notices to watch for; after a notice, this "
        "machine's workers leave before the machine stops. auto: the provider named by the "
        "machine's firmware, if any.",
        envvar="SHOAL_PREEMPTION_NOTICE",
    ),
]
HealthChecks = Annotated[
    bool,
    typer.Option(
        "--health-checks",
        help="Run the checks of `shoal health` before workers start and before a worker is "
        "replaced. The job refuses a machine that fails them.",
        envvar="SHOAL_HEALTH_CHECKS",
    ),
]
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress",
        help="Show the progress of an elastic run: as a bar on a terminal, otherwise as a line on "
        "standard error every 30 s.",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.png|FILE.svg",
        help="At the end, plot the loss, other reported numbers and the throughput over time to "
        "this file, with faults, joins and leaves marked. May be a URL (s3://bucket/run.svg). "
        "Requires matplotlib (the extra [plot]).",
        show_default=False,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of restarts. Workers of a plain script restart together, and "
        "restarts are counted for all; elastic workers restart one by one, each with its own "
        "count. Default: 0, or 3 for elastic workers that were killed or evicted without "
        "raising an exception.",
        envvar="PET_MAX_RESTARTS",
        show_envvar=False,
        show_default=False,
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        help="Minimum number of workers with which training continues once it has begun. Default: "
        "1 or, with --nnodes MIN:MAX, the number of workers on MIN machines.",
        show_default=False,
    ),
]
FailFast = Annotated[
    bool,
    typer.Option(
        "--fail-fast/--no-fail-fast",
        help="End the job if an elastic worker raises an exception and is not restarted. With "
        "--no-fail-fast, the other workers continue, and the exit status at the end is that "
        "of the failed worker.",
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
        help="Start again from step 0 if all workers that hold the training state have died and "
        "the script loads no checkpoint. Without this flag, the job then fails.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the coordinator. Default: the coordinator of the newest cluster on "
        "this machine.",
        envvar="SHOAL_COORDINATOR",
    ),
]
Job = Annotated[
    str | None,
    typer.Option(help="Id of the job. Default: the coordinator's only job.", envvar="SHOAL_JOB_ID"),
]
PastRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Past run of this machine to show: JOB/NUMBER as listed by `shoal history`, or a "
        "job's id for its newest run. Default, if no cluster is running: the newest run.",
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


# -------------------------------------------------------------------------------------- credentials


def _file(flag: str, text: str) -> Any:
    variable = "SHOAL_" + flag.removeprefix("--").replace("-", "_").upper()
    return Annotated[
        Path | None,
        typer.Option(flag, help=f"{text} Default: {variable}.", metavar="FILE", show_default=False),
    ]


_CREDENTIALS: Final = {
    "tls_ca": _file(
        "--tls-ca",
        "PEM file with the certificate authorities that the cluster's certificates are "
        "signed by; enables TLS.",
    ),
    "tls_cert": _file(
        "--tls-cert",
        "PEM file with the client certificate of this command, if the cluster requires one.",
    ),
    "tls_key": _file("--tls-key", "PEM file with the private key of --tls-cert."),
    "token_file": _file(
        "--token-file", "File with the bearer token; SHOAL_TOKEN holds the token itself."
    ),
}


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags for a cluster's credentials to a command. The values of these flags are stored
    in environment variables of this process, which all settings read and child processes
    inherit."""

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
