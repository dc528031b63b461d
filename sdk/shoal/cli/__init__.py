"""The command `shoal`. Each subcommand has a module, which is imported when the subcommand is
called. None of them imports torch, so that `shoal run` starts as fast as possible."""

from shoal.cli.entry import main

__all__ = ["main"]
