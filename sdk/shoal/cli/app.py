"""The command-line program: its subcommands, and how errors are shown. The flags of each subcommand
are in its own module, whose dependencies are imported when the subcommand is called.

Flags may be spelled with hyphens or underscores, as in torchrun. docs/exit-status.md lists the exit
statuses, docs/troubleshooting.md the errors and their remedies.
"""

from __future__ import annotations

import errno
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from shoal_common.errors import ConfigurationError, ShoalError
from shoal_common.security.secrets import take_secrets

from shoal.cli.commands.certs import certs
from shoal.cli.commands.check import check
from shoal.cli.commands.compare import compare
from shoal.cli.commands.control import drain, kill, readmit, stop
from shoal.cli.commands.coordinate import coordinate
from shoal.cli.commands.demo import demo
from shoal.cli.commands.events import events
from shoal.cli.commands.health import health
from shoal.cli.commands.history import history
from shoal.cli.commands.init import init
from shoal.cli.commands.jobs import jobs
from shoal.cli.commands.logs import logs
from shoal.cli.commands.plan import plan
from shoal.cli.commands.run import run
from shoal.cli.commands.stacks import stacks
from shoal.cli.commands.status import status
from shoal.cli.commands.submit import submit
from shoal.cli.commands.top import top
from shoal.cli.commands.up import up
from shoal.cli.options import with_credentials

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
# Arguments after the script, including flags, belong to the script.
app.command(context_settings={"allow_interspersed_args": False})(with_credentials(run))
app.command(context_settings={"allow_interspersed_args": False})(up)
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)(with_credentials(submit))
app.command()(plan)
app.command()(init)
app.command()(check)
app.command()(compare)
app.command()(with_credentials(jobs))
app.command(context_settings={"allow_interspersed_args": False})(with_credentials(coordinate))
app.command()(certs)
app.command()(health)
app.command()(history)
app.command()(with_credentials(status))
app.command()(with_credentials(top))
app.command()(with_credentials(events))
app.command()(with_credentials(logs))
app.command()(with_credentials(stacks))
app.command()(with_credentials(drain))
app.command()(with_credentials(readmit))
app.command()(with_credentials(stop))
app.command()(with_credentials(kill))
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(demo)


def run_command() -> None:
    """Runs the subcommand given on this process's command line, and exits with its status."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        # Reasons have entries in docs/troubleshooting.md; a class's default reason would not add
        # information to the message.
        reason = "" if error.reason == error.default_reason else f" [{error.reason}]"
        print(f"shoal: {error}{reason}", file=sys.stderr)  # noqa: T201 - errors become text here
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except OSError as error:
        # errors become text here
        print(f"shoal: {_described(error)}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _described(error: OSError) -> str:
    """Returns the text of an OSError. Adds a remedy if the cause is the machine rather than the
    command."""
    if error.errno == errno.ENOSPC:
        return f"{error}; free some space, or set TMPDIR to a directory on another disk"
    if error.errno == errno.ENOENT and "temporary directory" in str(error):
        return f"{error.strerror}; set TMPDIR to a writable directory"
    if error.errno in (errno.EROFS, errno.EACCES):
        return f"{error}; use a writable directory (set TMPDIR for a run's temporary files)"
    return str(error)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Elastic distributed training for PyTorch."""
    take_secrets()  # before starting any process that could inherit them
