"""Command `shoal`: one module per command, imported when the command is called. None of them
imports torch, since `shoal run` must start as fast as possible."""

from shoal.cli.entry import main

__all__ = ["main"]
