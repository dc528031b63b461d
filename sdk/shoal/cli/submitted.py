"""Process of a background run: `python -m shoal.cli.submitted DIRECTORY RECORD ARGUMENTS`.

The process forks before it imports anything large. The parent writes the submission's record and
exits; its exit shows the submitter that the launcher exists. The child leads its own session, runs
`shoal run ARGUMENTS`, and finally writes the outcome.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from shoal_common.exit_status import PREEMPTED

from shoal.launcher.run.submissions import Outcome, log_of, write_outcome, write_record


def main() -> None:
    """Forks the launcher and records its outcome, as described in the module's docstring."""
    directory, known, arguments = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    written, writing = os.pipe()
    child = os.fork()
    if child:
        write_record(directory, pid=child, started_unix_s=time.time(), arguments=arguments, **known)
        os.write(writing, b"+")
        return
    os.setsid()
    os.close(writing)
    if not os.read(written, 1):
        os._exit(1)  # the parent died before it could record this run
    os.close(written)
    _run(directory, arguments)


def _run(directory: Path, arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, _end_early)
    from shoal.cli.entry import main as shoal

    sys.argv = ["shoal", "run", *arguments]
    status, summary = 1, ""
    try:
        shoal()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        summary = getattr(end, "summary", "") or (_last_words(directory) if status else "")
    except BaseException as error:
        traceback.print_exc()
        summary = f"{type(error).__name__}: {error}"
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        write_outcome(
            directory, Outcome(exit_status=status, summary=summary, ended_unix_s=time.time())
        )
    sys.exit(status)


def _end_early(*_: object) -> None:
    """Handler for signals that arrive before the launcher handles signals: exits."""
    sys.exit(PREEMPTED)


def _last_words(directory: Path) -> str:
    """Returns the last line printed by the launcher itself (not by a worker), ignoring messages
    about the location of the logs; empty if there is none."""
    from shoal.launcher.workers.log_uploads import ABOUT_LOGS  # imports fsspec

    lines = log_of(directory).read_text(errors="replace").splitlines()
    own = (line.removeprefix("shoal: ") for line in reversed(lines) if line.startswith("shoal: "))
    return next((line for line in own if not line.startswith(ABOUT_LOGS)), "")


if __name__ == "__main__":
    main()
