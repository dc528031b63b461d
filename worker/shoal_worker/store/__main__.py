"""`python -m shoal_worker.store script.py [arguments]` registers the init method redis:// and runs
a script that does not import shoal.

Otherwise, the command is equivalent to `python script.py`: sys.argv, sys.path[0] and __name__ have
the values that the script expects.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from shoal_worker import torch_extensions


def main() -> None:
    """Runs the script named by the first argument."""
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -m shoal_worker.store SCRIPT [ARGUMENTS]: runs the script with "
            "support for init_method='redis://HOST:PORT/JOB'"
        )
    torch_extensions.register()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


main()
