"""The command `shoal`: one module per command, imported when it is called. No torch here;
`shoal run` must start as fast as it can."""

from shoal.cli.entry import main

__all__ = ["main"]
