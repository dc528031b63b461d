"""What a collective raises when its group is over: Shoal's error that is also torch's."""

from __future__ import annotations

from shoal_common.errors import MembershipChanged
from torch.distributed import DistBackendError


class GroupEndedError(MembershipChanged, DistBackendError):
    """The group is over: it was aborted, a peer went away, or a collective took longer than the group's timeout."""
