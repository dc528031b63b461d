"""Flags shared by several commands."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

Script = Annotated[
    str, typer.Argument(help="The training script; with -m a module.", show_default=False)
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)]
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
        help="Parameter servers of the job, for async_sgd and sparse tables. Without, a cluster of "
        "the run's own starts one for a script "
        "that asks."
    ),
]
ServerBackups = Annotated[
    int,
    typer.Option(
        help="Backups of each parameter server, 0 or 1: with one, a server that dies is replaced "
        "at once.",
        min=0,
        max=1,
    ),
]
MaxServers = Annotated[
    int,
    typer.Option(
        help="Parameter servers at most: those started later get a share while training continues. "
        "Default: --servers.",
        min=0,
    ),
]
RecordDirectory = Annotated[
    Path | None,
    typer.Option(
        "--record-dir",
        help="Record every sample index and commit there, as JSON lines.",
        show_default=False,
    ),
]
Metrics = Annotated[
    bool,
    typer.Option(
        help="Workers serve Prometheus metrics, at SHOAL_METRICS_LISTEN or any port of loopback."
    ),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm/--no-warm",
        help="Fork workers from a process that has imported torch; --no-warm: a fresh interpreter "
        "for each.",
        envvar="SHOAL_WARM",
    ),
]
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress",
        help="Show how far an elastic run is: a bar on a terminal, else a line to standard error "
        "every 30 s.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png|FILE.svg",
        help="Draw the loss, other reported numbers and the throughput over time there at the end, "
        "with faults, joins and leaves. "
        "Needs matplotlib: the extra [plot].",
        show_default=False,
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        help="How often workers are started again: a plain script's all together, elastic ones "
        "each by itself. "
        "Default: 0; 3 for elastic workers that did not raise, but were killed or evicted.",
        envvar="PET_MAX_RESTARTS",
        show_envvar=False,
        show_default=False,
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        help="Fewest workers that training continues with once it has begun. Default: 1; with "
        "--nnodes MIN:MAX the workers of MIN machines.",
        show_default=False,
    ),
]
FailFast = Annotated[
    bool,
    typer.Option(
        "--fail-fast/--no-fail-fast",
        help="An elastic worker that raises, and is not started again, ends the job. Else the "
        "others continue, and the status is its own.",
    ),
]
FailOnStop = Annotated[
    bool,
    typer.Option(
        "--fail-on-stop",
        help="The status of a run that `shoal stop` ended is 75 (unfinished), not 0.",
    ),
]
FromScratch = Annotated[
    bool,
    typer.Option(
        "--allow-restart-from-scratch",
        help="Begin again at step 0 when all workers that held the training state are dead and the "
        "script loads no checkpoint. "
        "Else that is an error.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the coordinator. Default: that of the newest cluster here.",
        envvar="SHOAL_COORDINATOR",
    ),
]
Job = Annotated[
    str | None,
    typer.Option(help="The job's id. Default: the only one there.", envvar="SHOAL_JOB_ID"),
]
PastRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A past run of this machine, JOB/NUMBER or a job, as `shoal history` lists them. "
        "Default: the newest, if no cluster runs.",
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
        "--tls-ca", "Certificates (PEM) that the cluster's must be signed by: speak TLS."
    ),
    "tls_cert": _file("--tls-cert", "Own certificate (PEM), where the cluster asks for one."),
    "tls_key": _file("--tls-key", "Its private key (PEM)."),
    "token_file": _file(
        "--token-file", "The bearer token, in a file; or the token itself in SHOAL_TOKEN."
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
