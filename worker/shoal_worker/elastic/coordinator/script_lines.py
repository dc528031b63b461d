"""Finds the line of the script that a thread executes, and what that line waits for, so that a
stalled step names its cause.

Reads no file when it is asked, since a script may hang in a file system: `remember_source` loads
the main script's lines beforehand.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

_OWN = ("shoal", "shoal_worker", "shoal_common", "shoal_protos")
"""Packages whose lines are not the script's, in addition to installed packages."""
_LONGEST: Final = 160
"""Maximum length of the result of `script_line` in characters."""
_MOST_SOURCE: Final = 60
"""Maximum length of a line of source in characters."""
_WAITS: Final = (
    ("torch/utils/data/dataloader.py", "_try_get_data", "waiting for a DataLoader worker"),
    ("/pdb.py", "", "in the debugger"),
    ("/subprocess.py", "", "waiting for a child process"),
    ("/multiprocessing/popen_fork.py", "", "waiting for a child process"),
    ("/multiprocessing/", "", "waiting for another process"),
    ("/ssl.py", "", "waiting for the network"),
    ("/socket.py", "", "waiting for the network"),
    ("/queue.py", "", "waiting for a queue"),
    ("/threading.py", "", "waiting for a lock or another thread"),
)
"""Part of a file's path, function (empty: any), and what its callers wait for. The first match with
any frame of a library counts."""


def libraries() -> tuple[str, ...]:
    """Returns the path prefixes of modules that are not part of the script."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for name in _OWN:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            paths.add(str(Path(file).parent))
    return ("<frozen ", *(f"{path}/" for path in paths if path))


def remember_source() -> None:
    """Loads the lines of the main script, which `script_line` then shows. Called once, before
    training."""
    _working_directory()
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is not None:
        linecache.getlines(file)


def script_line(thread: int) -> str:
    """Returns the innermost line of the script on the thread's stack, for example
    "train.py:41 in load (batch = queue.get()), waiting for a queue"; empty if there is none, or if
    the thread has ended. Never blocks."""
    frame, foreign = sys._current_frames().get(thread), libraries()
    inside: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename.startswith(foreign):
        inside.append(frame)
        frame = frame.f_back
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
    source = _source(code.co_filename, line)
    reason = next(
        (
            f", {reason}"
            for part, of, reason in _WAITS
            if any(
                part in each.f_code.co_filename and of in ("", each.f_code.co_name)
                for each in inside
            )
        ),
        "",
    )
    return f"{_shown(code.co_filename)}:{line}{function}{source}"[: _LONGEST - len(reason)] + reason


def _source(file: str, line: int) -> str:
    """Returns a line that was loaded before; empty if it was not."""
    entry = linecache.cache.get(file)
    if entry is None or len(entry) < 4 or not 1 <= line <= len(entry[2]):
        return ""
    text = entry[2][line - 1].partition("  #")[0].strip().rstrip(":")
    return f" ({text[:_MOST_SOURCE]}{'...' if len(text) > _MOST_SOURCE else ''})"


def _shown(file: str) -> str:
    """Returns a path relative to the working directory if the file is inside of it, otherwise the
    name of the file."""
    here = f"{_working_directory()}/"
    return file.removeprefix(here) if file.startswith(here) else Path(file).name


@cache
def _working_directory() -> str:
    """Returns the directory in which the script was started; the root if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""
