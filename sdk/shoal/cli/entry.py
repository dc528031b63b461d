"""Where the program starts. Its commands are loaded here, so that Ctrl-C ends it without a
traceback while they are, too."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of the console script and of `python -m shoal`."""
    try:
        from shoal.cli.app import run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
