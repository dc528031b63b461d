"""Entry point of the program. Its commands are loaded here, so that Ctrl-C ends it without a
traceback even while they load."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script and of `python -m shoal`."""
    try:
        from shoal.cli.app import run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
