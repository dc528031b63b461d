"""`shoal check`: lists lines of a script that are wrong or wasteful in an elastic run."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import Annotated

import typer
from shoal_common.errors import ConfigurationError


def check(
    scripts: Annotated[
        list[Path], typer.Argument(metavar="SCRIPT.py...", help="Scripts.", show_default=False)
    ],
) -> None:
    """List lines of a script that are wrong or wasteful in an elastic run, with a remedy for each.

    The script is parsed, not executed. The exit status is 0 if nothing was found, otherwise 1. A
    training loop whose batches come from a source that the script does not show, or that collects
    its own samples, is reported, but does not affect the exit status. Nor does a note. A line that
    ends with `# shoal: ignore` is skipped.
    """
    from shoal.checking.rules import check as checked

    count = checked_scripts = unclear = 0
    for path in scripts:
        try:
            found = checked(_read(path), str(path))
        except SyntaxError as error:
            raise ConfigurationError(
                f"{path}:{error.lineno}: not a Python script: {error.msg}"
            ) from error
        if found is None:
            typer.echo(f"{path}: found no training loop, so nothing was checked")
            continue
        checked_scripts += 1
        for finding in found:
            note = "note: " if finding.note else ""
            typer.echo(f"{path}:{finding.line}: {note}{finding.what}\n    remedy: {finding.remedy}")
        count += sum(finding.certain and not finding.note for finding in found)
        unclear += sum(not finding.certain for finding in found)
    if count:
        typer.echo(f"{count} line{'' if count == 1 else 's'} to change")
        raise typer.Exit(1)
    if unclear:
        loops = "loop" if unclear == 1 else f"{unclear} loops"
        typer.echo(f"found no line to change, but could not check the data of the {loops} above")
    elif checked_scripts == len(scripts):
        typer.echo("nothing to change")
    elif checked_scripts:
        typer.echo(f"nothing to change in {checked_scripts} of {len(scripts)} scripts")


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
