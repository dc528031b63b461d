"""Entry point of the program. It also imports the commands, so that Ctrl-C during the imports ends
the program without a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the console script or `python -m shoal`."""
    try:
        from shoal.cli.app import run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
