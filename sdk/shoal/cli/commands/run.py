"""`shoal run`: converts torchrun's flags to the settings of a run, and runs it."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer
from shoal_common.errors import ConfigurationError

from shoal.cli.options import (
    Arguments,
    FailFast,
    FailOnStop,
    FromScratch,
    HealthChecks,
    MaxRestarts,
    MaxServers,
    Metrics,
    MinWorkers,
    Module,
    Plot,
    PreemptionNotice,
    Progress,
    RecordDirectory,
    Script,
    ServerBackups,
    Servers,
    Warm,
)
from shoal.launcher.clusters.jobs import new_job_id
from shoal.launcher.machines.notices import NoticeSource
from shoal.launcher.workers.settings import (
    LogSettings,
    NodeRange,
    RunSettings,
    parse_workers,
    worker_command,
)

_DEFAULT_JOB_ID = "default"


def run(
    script: Script,
    arguments: Arguments = None,
    nnodes: Annotated[
        str,
        typer.Option(
            help="Number of machines, or a range MIN:MAX.", envvar="PET_NNODES", show_envvar=False
        ),
    ] = "1",
    nproc_per_node: Annotated[
        str,
        typer.Option(
            help="Workers per machine: a number, auto, cpu or gpu.",
            envvar="PET_NPROC_PER_NODE",
            show_envvar=False,
        ),
    ] = "1",
    min_workers: MinWorkers = None,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="Run on this machine alone, with its own coordinator. This is the default "
            "without --rdzv-endpoint.",
            envvar="PET_STANDALONE",
            show_envvar=False,
        ),
    ] = False,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of a running coordinator that all machines can reach.",
            envvar="PET_RDZV_ENDPOINT",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option(
            help="Id of the job; pass the same id on all machines.",
            envvar="PET_RDZV_ID",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the job's newest run, with the data of its parameter servers, if that "
            "run failed or was stopped; an error if it completed. Without --resume, a new "
            "run begins if the newest one has ended. An interrupted run is continued in "
            "either case.",
        ),
    ] = False,
    run_number: Annotated[
        int,
        typer.Option(
            "--run",
            help="Take part only in the run with this number; exit with status 0 if it has "
            "completed. Default: the run in progress, otherwise the next run.",
            show_default=False,
            min=0,
        ),
    ] = 0,
    rdzv_backend: Annotated[
        str,
        typer.Option(
            help="Accepted for compatibility with torchrun; the backend is always shoal.",
            envvar="PET_RDZV_BACKEND",
            show_envvar=False,
        ),
    ] = "shoal",
    rdzv_conf: Annotated[
        str,
        typer.Option(
            help="join_timeout=SECONDS: maximum wait until MIN machines have joined; "
            "last_call_timeout=SECONDS: additional wait for more than MIN machines.",
            envvar="PET_RDZV_CONF",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    max_restarts: MaxRestarts = None,
    fail_fast: FailFast = True,
    fail_on_stop: FailOnStop = False,
    allow_restart_from_scratch: FromScratch = False,
    monitor_interval: Annotated[
        float,
        typer.Option(
            help="Accepted for compatibility with torchrun and ignored: ends of workers are "
            "detected at once.",
            show_default=False,
        ),
    ] = 0,
    start_method: Annotated[
        str, typer.Option(help="Accepted for compatibility with torchrun.", hidden=True)
    ] = "",
    role: Annotated[
        str,
        typer.Option(
            help="Value of ROLE_NAME in the workers' environment.",
            envvar="PET_ROLE",
            show_envvar=False,
        ),
    ] = "default",
    module: Module = False,
    no_python: Annotated[
        bool,
        typer.Option(
            "--no-python",
            help="Run SCRIPT as a program instead of a Python script.",
            envvar="PET_NO_PYTHON",
            show_envvar=False,
        ),
    ] = False,
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY|URL",
            help="Write each worker's output to files in this directory. With a URL "
            "(s3://bucket/logs), the files are uploaded every minute and at the end.",
            envvar="PET_LOG_DIR",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    redirects: Annotated[
        str,
        typer.Option(
            "--redirects",
            "-r",
            help="Write output to files instead of the console. 1: stdout, 2: stderr, 3: both; or "
            "by local rank, as in 0:3,1:2.",
            envvar="PET_REDIRECTS",
            show_envvar=False,
        ),
    ] = "0",
    tee: Annotated[
        str,
        typer.Option(
            "--tee",
            "-t",
            help="Write output both to files and to the console; same values as --redirects.",
            envvar="PET_TEE",
            show_envvar=False,
        ),
    ] = "0",
    local_ranks_filter: Annotated[
        str,
        typer.Option(
            help="Show only the output of these local ranks on the console, as in 0,1.",
            envvar="PET_LOCAL_RANKS_FILTER",
            show_envvar=False,
            show_default=False,
        ),
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="Rank of this machine; requires --master-addr. Default: the launchers agree on "
            "their ranks.",
            envvar="PET_NODE_RANK",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="Value of MASTER_ADDR in the workers' environment. Default: the launchers agree "
            "on it.",
            envvar="PET_MASTER_ADDR",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            help="Value of MASTER_PORT in the workers' environment. Default: a free port.",
            envvar="PET_MASTER_PORT",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|INTERFACE|HOSTNAME",
            help="Address at which other machines reach this one. Default: the local address of "
            "connections to --rdzv-endpoint.",
            envvar=["SHOAL_LOCAL_ADDR", "PET_LOCAL_ADDR"],
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    listen_addr: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|INTERFACE|HOSTNAME",
            help="Address on which workers listen if others reach them at a different one (NAT), "
            "as in 0.0.0.0. Default: --local-addr.",
            envvar="SHOAL_LISTEN_ADDR",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(
            help="Seconds between SIGTERM and SIGKILL when workers are stopped. Default: 300 for "
            "elastic workers, 30 for other workers or after a failure.",
            envvar="PET_SHUTDOWN_TIMEOUT",
            show_envvar=False,
            show_default=False,
            min=0,
        ),
    ] = None,
    servers: Servers = 0,
    server_backups: ServerBackups = 0,
    max_servers: MaxServers = 0,
    record_dir: RecordDirectory = None,
    metrics: Metrics = True,
    warm: Warm = True,
    preemption_notice: PreemptionNotice = NoticeSource.AUTO,
    health_checks: HealthChecks = False,
    progress: Progress = True,
    plot: Plot = None,
) -> None:
    """Run a script on many workers, as torchrun does.

    The flags, and the environment variables of the workers, are the same as with torchrun, so a
    plain torchrun script runs unchanged. A script that calls shoal.init() is elastic: when a worker
    dies, the others continue and another worker replaces it. Flags may also be given by torchrun's
    PET_... variables.

    The exit status is 0 only if the script finished. Otherwise it is the status of the script, 75
    (the run is not finished) or 143 (the launcher was asked to exit); see docs/exit-status.md.
    """
    from shoal.cli.terminal.console import run_to_exit, tell

    if rdzv_backend not in ("shoal", "static"):
        tell(f"ignoring --rdzv-backend {rdzv_backend}: launchers meet at Shoal's coordinator")
    if monitor_interval or start_method:
        tell(
            "ignoring --monitor-interval and --start-method: ends of workers are detected at "
            "once, and each worker is a separate program"
        )
    if standalone and rdzv_endpoint:
        tell("ignoring --rdzv-endpoint: --standalone starts its own coordinator")
    endpoint = None if standalone or not rdzv_endpoint else rdzv_endpoint
    settings = RunSettings(
        command=worker_command(script, arguments or (), module=module, python=not no_python),
        program=script,
        job_id=rdzv_id or (_DEFAULT_JOB_ID if endpoint else new_job_id(script)),
        workers=parse_workers(nproc_per_node),
        nodes=NodeRange.parse(nnodes),
        min_workers=min_workers,
        endpoint=endpoint,
        run=run_number,
        resume=resume,
        servers=servers,
        server_backups=server_backups,
        max_servers=max_servers,
        max_restarts=max_restarts,
        fail_fast=fail_fast,
        fail_on_stop=fail_on_stop,
        allow_restart_from_scratch=allow_restart_from_scratch,
        shutdown_timeout=None if shutdown_timeout is None else timedelta(seconds=shutdown_timeout),
        node_rank=node_rank,
        master_address=master_addr,
        master_port=master_port,
        local_address=local_addr,
        listen_address=listen_addr,
        role=role,
        logs=LogSettings.parse(
            place=log_dir, redirects=redirects, tee=tee, console_ranks=local_ranks_filter
        ),
        record_directory=record_dir,
        metrics=metrics,
        warm=warm,
        preemption_notice=preemption_notice,
        health_checks=health_checks,
        progress=progress,
        plot=plot,
        **_rendezvous(rdzv_conf),
    )
    run_to_exit(settings)


def _rendezvous(configuration: str) -> dict[str, Any]:
    """Converts the supported keys of --rdzv-conf to fields of RunSettings. Ignores torchrun's other
    keys, which configure its own rendezvous backends."""
    fields = {"last_call_timeout": "join_grace", "join_timeout": "join_timeout"}
    found = {}
    for setting in filter(None, configuration.split(",")):
        name, _, value = setting.partition("=")
        if field := fields.get(name.strip()):
            try:
                found[field] = timedelta(seconds=float(value))
            except (ValueError, OverflowError):
                raise ConfigurationError(
                    f"--rdzv-conf {configuration!r}: {name.strip()}={value!r} is invalid; "
                    "expected a number of seconds"
                ) from None
    return found
