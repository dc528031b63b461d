"""`shoal init`: writes a starter training script, or an elastic copy of a plain script."""

from __future__ import annotations

import difflib
import shlex
import sys
import tokenize
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from shoal_common.errors import ConfigurationError


def init(
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCRIPT.py",
            help="File to write. Default: train.py or, with --from NAME.py, NAME_elastic.py in "
            "the same directory. On a terminal, the command prompts for it.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PLAIN.py",
            help="Plain PyTorch script to convert. The converted copy is written to SCRIPT.py.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file if it exists.")
    ] = False,
) -> None:
    """Write a starter training script, and show the command that runs it.

    With --from, write an elastic copy of an existing script instead, and show the changes as a
    diff. The existing script is parsed, not executed. Its training loop is converted only if the
    result is certain to be correct; otherwise the copy ends with an error above the loop. Comments
    that start with "shoal:" mark what is left to do.
    """
    default = plain.with_name(f"{plain.stem}_elastic.py") if plain else Path("train.py")
    if script is None:
        script = Path(typer.prompt("Script to write", default)) if _is_on_terminal() else default
    path = shlex.quote(str(script))
    if plain is None:
        starter = files("shoal.cli").joinpath("starter.py").read_text("utf-8")
        convert = f"run `shoal init --from {path}` to convert it, "
        _write(script, starter, force=force, instead=convert)
        typer.echo(f"wrote {script}")
    else:
        _convert(plain, script, force=force)
    typer.echo(f"next: shoal run --standalone --nproc-per-node 2 {path}")


def _is_on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _convert(plain: Path, script: Path, *, force: bool) -> None:
    from shoal.checking.conversion import MARK, convert

    source, encoding = _read(plain)
    try:
        conversion = convert(source, str(plain))
    except SyntaxError as error:
        raise ConfigurationError(
            f"{plain}:{error.lineno}: not a Python script: {error.msg}"
        ) from error
    if conversion is None:
        raise ConfigurationError(
            f"{plain}: found no training loop, so there is nothing to convert; run `shoal "
            "init` without --from to write a starter script"
        )
    if conversion.source == source:
        typer.echo(f"{plain}: the script needs no changes, so no file was written")
        raise typer.Exit
    _write(script, conversion.source, encoding, force=force)
    for line in difflib.unified_diff(
        source.splitlines(), conversion.source.splitlines(), str(plain), str(script), lineterm=""
    ):
        typer.echo(line)
    typer.echo(f"\nwrote {script}")
    if conversion.obstacles:
        reasons = "\n  ".join(conversion.obstacles)
        left = (
            f", so the copy ends with an error above it; {conversion.page} shows how to convert it"
            if conversion.page
            else ""
        )
        typer.echo(f"the training loop was not converted{left}:\n  {reasons}")
    if marks := conversion.marks:
        places = "place" if marks == 1 else f"{marks} places"
        typer.echo(f"first edit the {places} marked '{MARK.strip()}'")


def _read(path: Path) -> tuple[str, str]:
    try:
        with tokenize.open(path) as file:
            return file.read(), file.encoding
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def _write(
    path: Path, source: str, encoding: str = "utf-8", *, force: bool, instead: str = ""
) -> None:
    """Writes a file. `instead`: first remedy in the error if the file exists and not `force`."""
    try:
        with path.open("w" if force else "x", encoding=encoding) as file:
            file.write(source)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path} already exists; {instead}name another file, or pass --force to overwrite it"
        ) from error
