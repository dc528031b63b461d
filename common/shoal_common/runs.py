"""A run of a job as text: how a launcher names it to its workers, and a server to its data
directory.

Free of protobuf, so that what reads files and environments needs none; messages are made where gRPC
is spoken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal_common.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its number in the job, and what tells it from one that had the number before the
    coordinator lost its data."""

    number: int
    began_unix_ms: int = 0
    """0: not known."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> Run:
        """From what `str` gives. Raises ConfigurationError, which names `what` was read."""
        found = re.fullmatch(r"([1-9]\d{0,8}):(\d{1,18})", text, re.ASCII)
        if found is None:
            raise ConfigurationError(
                f"{what}={text!r}: expected NUMBER:MILLISECONDS, a run and when it began, as in "
                "2:1790000000000"
            )
        return cls(number=int(found[1]), began_unix_ms=int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}:{self.began_unix_ms}"
