"""`shoal` with the summary of failed workers also written to a file: `python -m
shoal.cli.summarized FILE ARGUMENTS`.

For programs that must distinguish failures of a launcher's own workers, which its exit status does
not (`shoal.ray`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cli.entry import main as shoal


def main() -> None:
    """Runs the program, as described in the module. Writes no file if no worker has failed."""
    file, sys.argv = Path(sys.argv[1]), ["shoal", *sys.argv[2:]]
    try:
        shoal()
    except SystemExit as end:
        if summary := getattr(end, "summary", ""):
            file.write_text(summary, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
