"""Finds the line of the script that a thread is executing, and what that line is waiting for, so
that reports of a stalled step can name the cause. Also shortens stack traces for people.

A script may hang while accessing a file system. These functions therefore read only /proc.
`remember_source` loads the main script's lines in advance."""

from __future__ import annotations

import itertools
import linecache
import re
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from shoal_common.system.frames import current_frames

_OWN = ("shoal", "shoal_worker", "shoal_common", "shoal_protos")
"""Packages that, like all installed packages, do not belong to the script."""
_LONGEST: Final = 160
"""Maximum length of the result of `script_line` in characters."""
_MOST_SOURCE: Final = 60
"""Maximum length of a line of source in characters."""
DATA_WORKER: Final = "waiting for a DataLoader worker"
_WAITS: Final = (
    ("torch/utils/data/dataloader.py", "_try_get_data", DATA_WORKER),
    ("/pdb.py", "", "in the debugger"),
    ("/bdb.py", "", "in the debugger"),
    ("/debugpy/", "", "in the debugger"),
    ("/subprocess.py", "", "waiting for a child process"),
    ("/multiprocessing/popen_fork.py", "", "waiting for a child process"),
    ("/multiprocessing/", "", "waiting for another process"),
    ("/ssl.py", "", "waiting for the network"),
    ("/socket.py", "", "waiting for the network"),
    ("/queue.py", "", "waiting for a queue"),
    ("/threading.py", "", "waiting for a lock or another thread"),
)
"""Known waits in libraries: part of the file's path, name of the function (empty: any), and what
its caller is waiting for. The first entry that matches a library's frame applies."""
_FRAME: Final = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')


class Call(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Returns the frame in the format of faulthandler."""
        return f'  File "{self.file}", line {self.line} in {self.function}'


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


def calls_of(thread: int) -> list[Call]:
    """Returns the calls of a thread of this process, innermost first; empty if it has ended."""
    frame: FrameType | None = current_frames().get(thread)
    calls = []
    while frame is not None:
        calls.append(Call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def parse_calls(stack: str) -> list[Call]:
    """Returns the calls of a stack in the format of faulthandler, innermost first."""
    found = map(_FRAME.match, stack.splitlines())
    return [Call(each[1], int(each[2]), each[3]) for each in found if each is not None]


def script_line(calls: Sequence[Call], waits_for: str = "") -> str:
    """Returns the innermost line of the script on a stack, for example "train.py:41 in load (batch
    = queue.get()), waiting for a queue"; empty if there is none. Never blocks. `calls`: calls on
    the stack, innermost first. `waits_for`: what the line is waiting for, if the caller already
    knows it; otherwise empty."""
    foreign = libraries()
    inside = list(itertools.takewhile(lambda call: call.file.startswith(foreign), calls))
    if len(inside) == len(calls):
        return ""
    at = calls[len(inside)]
    function = "" if at.function == "<module>" else f" in {at.function}"
    reason = next(
        (
            reason
            for part, of, reason in _WAITS
            if any(part in call.file and of in ("", call.function) for call in inside)
        ),
        waits_for,
    )
    reason = f", {reason}" if reason else ""
    text = f"{_shown(at.file)}:{at.line}{function}{_source(at.file, at.line)}"
    return text[: _LONGEST - len(reason)] + reason


def folded(calls: Sequence[Call]) -> str:
    """Returns a stack in which each series of library frames is replaced by one line."""
    foreign, lines = libraries(), []
    for is_foreign, frames in itertools.groupby(calls, key=lambda c: c.file.startswith(foreign)):
        innermost, *others = map(str, frames)
        lines += [innermost, *([] if is_foreign else others)]
        if is_foreign and others:
            lines.append(f"  ... {len(others)} more of libraries")
    return "\n".join(lines)


def runs_script(calls: Sequence[Call]) -> bool:
    """Returns whether a stack contains a line of the script."""
    foreign = libraries()
    return any(not call.file.startswith(foreign) for call in calls)


def _source(file: str, line: int) -> str:
    """Returns a source line as it is shown to people, if `remember_source` has loaded it; otherwise
    an empty string."""
    entry = linecache.cache.get(file)
    if entry is None or len(entry) < 4 or not 1 <= line <= len(entry[2]):
        return ""
    text = entry[2][line - 1].partition("  #")[0].strip().rstrip(":")
    return f" ({text[:_MOST_SOURCE]}{'...' if len(text) > _MOST_SOURCE else ''})"


def _shown(file: str) -> str:
    """Returns a path relative to the working directory if the file is inside it, otherwise its file
    name."""
    here = f"{_working_directory()}/"
    return file.removeprefix(here) if file.startswith(here) else Path(file).name


@cache
def _working_directory() -> str:
    """Returns the working directory; the root directory if the working directory has been
    deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""
