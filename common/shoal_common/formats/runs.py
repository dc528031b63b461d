"""Text form of a job's run, used by a launcher for its workers and by a server for its data
directory.

Free of protobuf, which code that reads files and environments does not need; messages are created
in the gRPC code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal_common.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its number in the job, and its start time, which distinguishes it from one with the
    same number before the coordinator lost its data."""

    number: int
    began_unix_ms: int = 0
    """0 if unknown."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> Run:
        """Parses the result of `str`. Raises ConfigurationError, which names the source `what`."""
        found = re.fullmatch(r"([1-9]\d{0,8}):(\d{1,18})", text, re.ASCII)
        if found is None:
            raise ConfigurationError(
                f"{what}={text!r}: expected NUMBER:MILLISECONDS, a run's number and start time, as "
                "in 2:1790000000000"
            )
        return cls(number=int(found[1]), began_unix_ms=int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}:{self.began_unix_ms}"
