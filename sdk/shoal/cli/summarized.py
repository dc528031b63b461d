"""Runs `shoal` and also writes the summary of failed workers to a file: `python -m
shoal.cli.summarized FILE ARGUMENTS`.

For programs that must know whether a launcher's own workers failed, which its exit status does not
tell (`shoal.ray`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cli.entry import main as shoal


def main() -> None:
    """Runs the program that the module describes. Writes no file if no worker has failed."""
    file, sys.argv = Path(sys.argv[1]), ["shoal", *sys.argv[2:]]
    try:
        shoal()
    except SystemExit as end:
        if summary := getattr(end, "summary", ""):
            file.write_text(summary, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
