"""Kinds of jobs in a campaign: the consistency of workers, and whether servers have backups or join
and leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODES = ("asp", "ssp", "bsp", "backups", "moves")
"""asp, ssp(BOUND) and bsp; asp with a backup for each server; and servers that join and are
drained, with each consistency in turn."""
BOUND = 3
_CONSISTENCY: dict[str, dict[str, Any]] = {
    "asp": {},
    "ssp": {"consistency": "ssp", "staleness_bound": BOUND},
    "bsp": {"consistency": "bsp"},
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One of `MODES`, with the consistency that the seed selects."""

    name: str
    consistency: str
    """asp, ssp or bsp."""

    @classmethod
    def of(cls, name: str, seed: int) -> Mode:
        """Returns the mode with that name."""
        consistency = (
            name
            if name in _CONSISTENCY
            else tuple(_CONSISTENCY)[seed % 3]
            if name == "moves"
            else "asp"
        )
        return cls(name=name, consistency=consistency)

    @property
    def backups(self) -> int:
        """Number of backups per server."""
        return int(self.name == "backups")

    @property
    def moves(self) -> bool:
        """True if servers join and are drained."""
        return self.name == "moves"

    @property
    def has_table(self) -> bool:
        """True if the model has a sparse table, which bsp does not support."""
        return self.consistency != "bsp"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the workers' strategy."""
        return _CONSISTENCY[self.consistency]
