"""Runs `shoal` and writes the summary of failed workers to a file: `python -m shoal.cli.summarized
FILE ARGUMENTS`.

`shoal.ray` uses this to find out whether a launcher's own workers failed, because the launcher's
exit status does not reveal it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cli.entry import main as shoal


def main() -> None:
    """Runs `shoal` with this process's arguments, then writes FILE if a worker has failed."""
    file, sys.argv = Path(sys.argv[1]), ["shoal", *sys.argv[2:]]
    try:
        shoal()
    except SystemExit as end:
        if summary := getattr(end, "summary", ""):
            file.write_text(summary, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
