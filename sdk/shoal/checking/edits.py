"""Edits of a source file by position."""

from __future__ import annotations

import ast
import itertools


class Edits:
    """Insertions and replacements by position, applied together."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()  # columns of ast are bytes
        self._lines = self._source.split(b"\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in self._lines)]
        self._edits: list[tuple[int, int, int, bytes]] = []
        """Offset, number, length of the replaced text, and new text of each edit."""
        self.count = 0

    def indent(self, line: int) -> str:
        """Returns the whitespace at the beginning of a line."""
        text = self._lines[line - 1]
        return text[: len(text) - len(text.lstrip())].decode()

    def before(self, line: int, text: str) -> None:
        self._edit(self._starts[line - 1], 0, text)
        self.count += 1

    def below(self, statement: ast.stmt, text: str) -> None:
        """Adds lines below a statement. The first gets the statement's indentation."""
        end = statement.end_lineno or statement.lineno
        self.before(end + 1, f"{self.indent(statement.lineno)}{text}\n")

    def shift(self, statement: ast.stmt) -> None:
        """Indents a statement by one level. It must not contain a string of several lines."""
        level = "\t" if self.indent(statement.lineno).endswith("\t") else "    "
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            self._edit(self._starts[line - 1], 0, level)

    def take(self, statement: ast.stmt) -> str:
        """Removes the lines of a statement, and comments directly above it. Returns them, without
        the first line's indentation and without the last line break."""
        first, end = statement.lineno, statement.end_lineno or statement.lineno
        while first > 1 and self._lines[first - 2].lstrip().startswith(b"#"):
            first -= 1
        start, length = self._starts[first - 1], self._starts[end] - self._starts[first - 1]
        self._edit(start, length, "")
        self.count += 1
        return self._source[start : start + length].decode().strip()

    def replace(self, node: ast.expr, text: str) -> None:
        start, end = self._span(node)
        self._edit(start, end - start, text)
        self.count += 1

    def unwrap(self, call: ast.Call) -> None:
        """Replaces a call with its first argument."""
        (start, end), (kept, kept_end) = self._span(call), self._span(call.args[0])
        self._edit(start, kept - start, "")
        self._edit(kept_end, end - kept_end, "")
        self.count += 1

    def enclose(self, node: ast.expr, before: str, after: str) -> None:
        start, end = self._span(node)
        self._edit(start, 0, before)
        self._edit(end, 0, after)
        self.count += 1

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _edit(self, start: int, length: int, text: str) -> None:
        self._edits.append((start, len(self._edits), length, text.encode()))

    def new_line(self, line: int) -> int:
        """Returns the number in the edited text of a line of the original text."""
        start = self._starts[line - 1]
        return line + sum(
            text.count(b"\n") - self._source[at : at + length].count(b"\n")
            for at, _, length, text in self._edits
            if at <= start
        )

    def apply(self) -> str:
        changed = self._source
        # of the edits at one place, removals come first
        for start, _, length, text in sorted(
            self._edits, key=lambda edit: (edit[0], edit[2] > 0, edit[1]), reverse=True
        ):
            changed = changed[:start] + text + changed[start + length :]
        return changed.decode()
