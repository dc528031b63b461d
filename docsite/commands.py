"""Writes docs/reference/commands.md: every command with its arguments and flags, from the parsers
themselves."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

import shoal_coordinator.settings
import shoal_ps_server.settings
import typer
from shoal.cli.app import app

_HEADER = """\
# Commands

Written from the programs' own parsers by `make reference`. `COMMAND --help` says the same. Flags
may be spelled with hyphens or with underscores. What a command's end means:
[exit statuses](../exit-status.md). Variables that stand for flags are in the last column; all
variables: [environment](environment.md).
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_group(app)
    context = typer.Context(group, info_name="shoal")
    lines = [_HEADER]
    for name, command in group.commands.items():
        if not command.hidden:
            lines += _command(name, command, typer.Context(command, parent=context, info_name=name))
    lines += _service(shoal_coordinator.settings.command_line())
    lines += _service(shoal_ps_server.settings.command_line())
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: Any, context: typer.Context) -> Iterator[str]:
    yield f"## shoal {name}\n"
    yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    rows = [
        _row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)
    ]
    if rows:
        yield from _table(("", "", "variable"), rows)


def _row(parameter: Any) -> tuple[str, str, str]:
    help_text = _sentence(parameter.help or "")
    if parameter.param_type_name == "argument":
        return f"`{_value(parameter)}`", help_text, ""
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    flag = isinstance(parameter.default, bool)
    if (
        parameter.show_default is not False
        and not flag
        and parameter.default not in (None, "")
        and "Default:" not in help_text
    ):
        help_text += f" Default: `{parameter.default}`."
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    return (
        names if flag else f"{names} `{_value(parameter)}`",
        help_text,
        ", ".join(f"`{name}`" for name in variables),
    )


def _value(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper().replace("_", "-"))


def _service(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    yield f"{parser.description} {parser.epilog}\n"
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    rows = [
        (
            ", ".join(f"`{name}`" for name in action.option_strings)
            + (f" `{action.metavar}`" if action.metavar else ""),
            _sentence(str(action.help or "")),
        )
        for action in shown
    ]
    yield from _table(("", ""), rows)


def _sentence(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("[", "\\[")
    text = text[:1].upper() + text[1:] if re.match(r"[a-z]+ ", text) else text
    return text if not text or text.endswith((".", ")")) else f"{text}."


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        cells = (
            cell.replace("|", "\\|") if "`" in cell and "\\" not in cell else cell for cell in row
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
