"""`shoal`, whose summary of failed workers is left in a file as well:
`python -m shoal.cli.summarized FILE ARGUMENTS`.

For a program that has to know whether a launcher's status is that of its own workers, which a
number does not say (`shoal.ray`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.cli.entry import main as shoal


def main() -> None:
    """See the module. There is no file where no worker has failed."""
    file, sys.argv = Path(sys.argv[1]), ["shoal", *sys.argv[2:]]
    try:
        shoal()
    except SystemExit as end:
        if summary := getattr(end, "summary", ""):
            file.write_text(summary, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
