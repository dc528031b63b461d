"""`shoal up`: runs a script on this machine under a live table."""

from __future__ import annotations

from typing import Annotated

import typer

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
from shoal.launcher.machines.notices import NoticeSource


def up(
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Workers.", min=1)] = 3,
    min_workers: MinWorkers = None,
    servers: Servers = 0,
    server_backups: ServerBackups = 0,
    max_servers: MaxServers = 0,
    module: Module = False,
    max_restarts: MaxRestarts = None,
    fail_fast: FailFast = True,
    fail_on_stop: FailOnStop = False,
    allow_restart_from_scratch: FromScratch = False,
    record_dir: RecordDirectory = None,
    metrics: Metrics = True,
    warm: Warm = True,
    preemption_notice: PreemptionNotice = NoticeSource.AUTO,
    health_checks: HealthChecks = False,
    progress: Progress = True,
    plot: Plot = None,
) -> None:
    """Run a script on a local cluster, under a live table.

    The cluster (Valkey, coordinator, parameter servers and workers) ends with the script. Without a
    terminal, the command works like `shoal run`.
    """
    from shoal.cli.terminal.console import run_to_exit
    from shoal.launcher.clusters.jobs import new_job_id
    from shoal.launcher.workers.settings import RunSettings, worker_command

    settings = RunSettings(
        command=worker_command(script, arguments or (), module=module, python=True),
        program=script,
        job_id=new_job_id(script),
        workers=workers,
        min_workers=min_workers,
        servers=servers,
        server_backups=server_backups,
        max_servers=max_servers,
        max_restarts=max_restarts,
        fail_fast=fail_fast,
        fail_on_stop=fail_on_stop,
        allow_restart_from_scratch=allow_restart_from_scratch,
        record_directory=record_dir,
        metrics=metrics,
        warm=warm,
        preemption_notice=preemption_notice,
        health_checks=health_checks,
        progress=progress,
        plot=plot,
    )
    run_to_exit(settings, live=True)
