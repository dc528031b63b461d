"""Findings of `shoal check`: lines to change or to know of, each with a remedy."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """A line to change."""

    line: int
    what: str
    """Effect of the line in an elastic run."""
    remedy: str
    certain: bool = True
    """False if the script does not show whether the line has this effect."""
    note: bool = False
    """True if the line need not change."""


def finding(node: ast.AST, what: str, remedy: str, *, certain: bool = True) -> Finding:
    """Returns the finding for the line on which a node starts."""
    return Finding(line=getattr(node, "lineno", 1), what=what, remedy=remedy, certain=certain)
