"""Identity of a job's run as text. Launchers pass it to their workers, and parameter servers store
it in their data directories.

This module does not import protobuf, because code that only reads files and environment variables
does not need it. The gRPC code creates the messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal_common.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Run:
    """Identity of a run: its number in the job, and its start time. The start time distinguishes it
    from an earlier run with the same number, which can exist if the coordinator has lost its
    data."""

    number: int
    began_unix_ms: int = 0
    """Start time; 0 if unknown."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> Run:
        """Parses the result of `str(run)`. `what`: source of the text, used in errors. Raises
        ConfigurationError."""
        found = re.fullmatch(r"([1-9]\d{0,8}):(\d{1,18})", text, re.ASCII)
        if found is None:
            raise ConfigurationError(
                f"{what}={text!r}: expected NUMBER:MILLISECONDS, a run's number and start time, as "
                "in 2:1790000000000"
            )
        return cls(number=int(found[1]), began_unix_ms=int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}:{self.began_unix_ms}"
