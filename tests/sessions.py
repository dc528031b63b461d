"""Runs the console sessions of a page of docs/ in real shells and compares their output with the
page.

A page has blocks of Markdown. `python title="train.py"` is a file, which is written. `console` is a
terminal: lines that begin with `$ ` are typed, and the following lines are the expected output.
`console title="second terminal"` is another terminal beside it; a block without a `$ ` shows
further output of the command that is still running there. Blocks of other kinds are for readers
only.

The comparison ignores numbers, except in `2 of 3 workers`: runs of digits, hexadecimal names, this
machine's name, and gaps between columns may differ. A line `...` matches any lines. Lines of
workers (`[0]: `) and all other lines are compared separately, each in order, because workers and
their launcher do not wait for each other. The last command of a block with a title may continue
while the next blocks are processed. A command that is typed beside a running one is repeated until
it prints what the page shows, because it observes something that is still changing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_DEADLINE_S = 300.0
_FIRST = "terminal"
_WORKER = re.compile(r"^\[[\d,-]+\]: ")
_NOW_AND_THEN = re.compile(
    r"^shoal: step N\b|^shoal: waiting for .* since the start$|"
    r": the others are waiting for rank N |: step N is lost: "
)
"""Output that depends on the machine's speed and on the current activity of a killed rank. It is
not compared."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Returns the fenced blocks in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


class Terminal:
    """One shell, which keeps its variables and its working directory. Its output goes to a file."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], deadline_s: float = _DEADLINE_S
    ) -> None:
        self._deadline_s = deadline_s
        self._printed = directory / f".terminal-{uuid.uuid4().hex}"
        with self._printed.open("wb") as out:
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=dict(environment),
                start_new_session=True,
            )
        self._begin = 0
        self._mark = ""

    def type(self, command: str) -> None:
        """Starts a command; `wait` waits for its end."""
        self._begin = len(self._printed.read_text())
        self._mark = f"ended-{uuid.uuid4().hex}"
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{{ {command}\n}} < /dev/null\necho {self._mark} $?\n".encode())
        self._shell.stdin.flush()

    @property
    def said(self) -> str:
        """Output of the newest command so far."""
        return (
            self._printed.read_text()[self._begin :].partition(self._mark)[0] if self._mark else ""
        )

    @property
    def status(self) -> int | None:
        """Exit status of the newest command; None while it runs."""
        ended = re.search(
            rf"^{self._mark} (\d+)$", self._printed.read_text()[self._begin :], re.MULTILINE
        )
        return int(ended[1]) if ended else None

    def wait(self) -> int:
        """Waits until the command has ended and returns its exit status."""
        deadline = time.monotonic() + self._deadline_s
        while (status := self.status) is None:
            assert time.monotonic() < deadline, f"it did not end; it said:\n{self.said}"
            assert self._shell.poll() is None, f"the shell ended; it said:\n{self.said}"
            time.sleep(0.05)
        return status

    def close(self) -> None:
        """Ends the shell and all processes in it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(10)
                break
        assert self._shell.stdin is not None
        self._shell.stdin.close()


class Session:
    """The terminals of a page, in one folder."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], deadline_s: float = _DEADLINE_S
    ) -> None:
        """Creates a session. `deadline_s` is the time limit of one command."""
        self.directory = directory
        self._deadline_s = deadline_s
        self._environment = environment
        self._terminals: dict[str, Terminal] = {}
        self.printed: list[tuple[str, str]] = []
        """Each command that has ended, with its output."""

    def follow(self, blocks: list[Block]) -> None:
        """Processes the blocks in order. An AssertionError names the command with unexpected
        output."""
        shown: dict[str, tuple[str, str]] = {}
        for block in blocks:
            if block.kind == "console":
                self._console(block, shown)
            elif block.title:
                (self.directory / block.title).write_text(block.text)
        for title in list(shown):
            self._end(title, shown)

    def close(self) -> None:
        for terminal in self._terminals.values():
            terminal.close()

    def _console(self, block: Block, shown: dict[str, tuple[str, str]]) -> None:
        title = block.title or _FIRST
        if title not in self._terminals:
            self._terminals[title] = Terminal(self.directory, self._environment, self._deadline_s)
        terminal = self._terminals[title]
        further, *commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        if further:
            command, before = shown[title]
            shown[title] = command, before + further
        for each in commands:
            command, _, expected = each.partition("\n")
            while command.endswith("\\"):  # continued on the next line
                line, _, expected = expected.partition("\n")
                command = f"{command}\n{line}"
            self._end(title, shown)
            if any(self._terminals[other].status is None for other in shown):
                self._look(terminal, command, expected)
            else:
                terminal.type(command)
                shown[title] = command, expected
        if not block.title:
            self._end(title, shown)

    def _look(self, terminal: Terminal, command: str, expected: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            terminal.type(command)
            if terminal.wait() == 0 and alike(expected, terminal.said):
                self.printed.append((command, terminal.said))
                return
            assert time.monotonic() < deadline, _difference(command, expected, terminal.said)
            time.sleep(0.2)

    def _end(self, title: str, shown: dict[str, tuple[str, str]]) -> None:
        if title in shown:
            command, expected = shown.pop(title)
            terminal = self._terminals[title]
            status, said = terminal.wait(), terminal.said
            assert status == 0, f"$ {command}\nended with status {status}; it said:\n{said}"
            assert alike(expected, said), _difference(command, expected, said)
            self.printed.append((command, said))


def alike(shown: str, said: str) -> bool:
    """Returns whether a command's output matches the page: the lines of workers in order, and the
    other lines in order."""
    return all(_alike(_lines(shown, workers), _lines(said, workers)) for workers in (True, False))


def _lines(text: str, workers: bool) -> str:
    """Returns the lines of workers, or all other lines, together with the lines `...`."""
    return "\n".join(
        line for line in text.split("\n") if line == "..." or bool(_WORKER.search(line)) == workers
    )


def _alike(shown: str, said: str) -> bool:
    expected, found = (
        [line for line in _without_numbers(text) if not _NOW_AND_THEN.search(line)]
        for text in (shown, said)
    )
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in expected
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in found)) is not None


def _without_numbers(text: str) -> list[str]:
    """Returns the lines of a text, with placeholders for numbers and names that differ between
    runs."""
    lines: list[str] = []
    for line in text.strip("\n").split("\n") if text.strip("\n") else []:
        line = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", line)
        # if a rank was killed while its peers were one step apart, recovery takes two generations
        line = re.sub(r"; the ranks changed \(generation \d+\)", "", line)
        line = re.sub(r"(?<!\.)\b(?=\w*\d)[0-9a-f]{6,}\b|(?<=-)[0-9a-f]{6}\b", "NAME", line)
        line = re.sub(
            r"\b(\d+) of (\d+) workers",
            lambda counts: f"{_word(counts[1])} of {_word(counts[2])} workers",
            line,
        )
        lines.append(" ".join(re.sub(r"\d[\d,.]*", "N", line).split()))
    return lines


def _word(number: str) -> str:
    """Returns a number that must be compared, in letters instead of digits."""
    return "".join(chr(ord("a") + int(digit)) for digit in number)


def _difference(command: str, expected: str, said: str) -> str:
    return f"$ {command}\nwas to print\n{expected}\nbut printed\n{said}"
