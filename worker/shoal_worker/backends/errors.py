"""What a collective raises when its group is over: Shoal's error that is also torch's. And what a library's errors say in short."""

from __future__ import annotations

import re
from typing import Final

from shoal_common.errors import MembershipChanged
from torch.distributed import DistBackendError

_SOURCE_LOCATION: Final = re.compile(r"^\[[^\]]*\] ")


class GroupEndedError(MembershipChanged, DistBackendError):
    """The group is over: it was aborted, a peer went away, or a collective took longer than the group's timeout."""


def cause_of(error: Exception) -> str:
    """What a library's error says, without where in its source, and without its advice."""
    first_line = _SOURCE_LOCATION.sub("", str(error).strip()).partition("\n")[0]
    return first_line.partition(". This is typically")[0] or type(error).__name__
