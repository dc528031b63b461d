"""Kinds of jobs in a campaign: the consistency of workers, and whether servers have backups or come
and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODES = ("asp", "ssp", "bsp", "backups", "moves")
"""asp, ssp(BOUND), bsp; asp where each server has a backup; and servers that come and are drained,
with each of the three in turn."""
BOUND = 3
_CONSISTENCY: dict[str, dict[str, Any]] = {
    "asp": {},
    "ssp": {"consistency": "ssp", "staleness_bound": BOUND},
    "bsp": {"consistency": "bsp"},
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One of `MODES`, as a seed has it."""

    name: str
    consistency: str
    """asp, ssp or bsp."""

    @classmethod
    def of(cls, name: str, seed: int) -> Mode:
        """The mode of that name."""
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
        """Servers come and are drained."""
        return self.name == "moves"

    @property
    def has_table(self) -> bool:
        """The model has a sparse table, which bsp does not take."""
        return self.consistency != "bsp"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the workers' strategy."""
        return _CONSISTENCY[self.consistency]
