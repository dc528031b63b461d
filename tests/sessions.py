"""Runs the console sessions of a page of docs/, in real shells, and compares what they print with
what the page shows.

A page has blocks of Markdown. `python title="train.py"` is a file, which is written. `console` is a
terminal: lines that begin with `$ ` are typed, and what follows them is what is printed.
`console title="second terminal"` is another terminal beside it; a block without a `$ ` shows what
the command that is still running there prints further. Blocks of other kinds are for readers.

Compared is the text without its numbers, but for `2 of 3 workers`: runs of digits, hexadecimal
names, this machine's name, and gaps between columns may differ. A line `...` stands for any lines.
Lines of workers (`[0]: `) and all others are compared apart, each in their order: workers and their
launcher do not wait for each other. The last command of a block with a title may go on while the
next blocks are followed; a command that is typed beside one that goes on is typed again until it
prints what the page shows, since it looks at something that is on its way.
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
_DEADLINE_S = 120.0
_FIRST = "terminal"
_WORKER = re.compile(r"^\[[\d,-]+\]: ")
_NOW_AND_THEN = re.compile(r"^shoal: step N\b|: the others wait for rank N |: step N is lost: ")
"""Output that depends on the machine's speed and on what a killed rank was just doing. It is not
compared."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks, in their order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


class Terminal:
    """One shell, which keeps its variables and its folder. What it prints goes to a file."""

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
        """Returns the output of the newest command so far."""
        return (
            self._printed.read_text()[self._begin :].partition(self._mark)[0] if self._mark else ""
        )

    @property
    def status(self) -> int | None:
        """The newest command's exit status; None: it goes on."""
        ended = re.search(
            rf"^{self._mark} (\d+)$", self._printed.read_text()[self._begin :], re.MULTILINE
        )
        return int(ended[1]) if ended else None

    def wait(self) -> int:
        """Until it ends."""
        deadline = time.monotonic() + self._deadline_s
        while (status := self.status) is None:
            assert time.monotonic() < deadline, f"it did not end; it said:\n{self.said}"
            assert self._shell.poll() is None, f"the shell ended; it said:\n{self.said}"
            time.sleep(0.05)
        return status

    def close(self) -> None:
        """Ends the shell and all that runs in it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(10)
                break
        assert self._shell.stdin is not None
        self._shell.stdin.close()


class Session:
    """A page's terminals, in one folder."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], deadline_s: float = _DEADLINE_S
    ) -> None:
        """`deadline_s`: longest that one command may take."""
        self.directory = directory
        self._deadline_s = deadline_s
        self._environment = environment
        self._terminals: dict[str, Terminal] = {}
        self.printed: list[tuple[str, str]] = []
        """Each command that ended, with all that it printed."""

    def follow(self, blocks: list[Block]) -> None:
        """Does what the blocks say, one after the other. An AssertionError says which command
        printed what instead."""
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
            while command.endswith("\\"):  # goes on in the next line
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
    """Returns whether a command said what a page shows: the workers theirs, in order, and the
    launcher, or what else was typed, its own."""
    return all(_alike(_lines(shown, workers), _lines(said, workers)) for workers in (True, False))


def _lines(text: str, workers: bool) -> str:
    """Returns what workers said, or what all others did, with the lines that stand for any."""
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
    """The lines of a text, in which numbers and names that differ from run to run are replaced."""
    lines: list[str] = []
    for line in text.strip("\n").split("\n") if text.strip("\n") else []:
        line = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", line)
        # a rank was killed while its peers were one step apart: two generations make up for it
        line = re.sub(r"; the ranks changed \(generation \d+\)", "", line)
        line = re.sub(r"\b(?=\w*\d)[0-9a-f]{6,}\b|(?<=-)[0-9a-f]{6}\b", "NAME", line)
        line = re.sub(
            r"\b(\d+) of (\d+) workers",
            lambda counts: f"{_word(counts[1])} of {_word(counts[2])} workers",
            line,
        )
        lines.append(" ".join(re.sub(r"\d[\d,.]*", "N", line).split()))
    return lines


def _word(number: str) -> str:
    """A number that is to be compared, without digits."""
    return "".join(chr(ord("a") + int(digit)) for digit in number)


def _difference(command: str, expected: str, said: str) -> str:
    return f"$ {command}\nwas to print\n{expected}\nbut printed\n{said}"
