"""`init_process_group("shoal_gloo")`: the same Gloo groups as torch's own default and sub-groups, for code that needs torch's world.

The name is not "gloo": torch ignores what is registered under a built-in name. Beyond torch's "gloo", these groups can be ended, from any
thread, by `group.abort()` (`torch.distributed.group.WORLD.abort()`), and let go of their sockets in forked children. An abort ends the
group on this rank, and at a peer what waits for this rank; other than a GlooBackend it does not end by itself when a peer leaves, since a
script may go on with the others. Timeouts, new_group and destroy_process_group are torch's. Importing this module registers the name, and
those of the backends that are process groups of their own (inmemory.py, mpi.py).
"""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed.distributed_c10d import GroupName

from shoal_worker.backends import inmemory, mpi
from shoal_worker.backends.forming import connect_gloo
from shoal_worker.backends.interface import address_for
from shoal_worker.backends.interruptible import InterruptibleGroup

NAME: Final = "shoal_gloo"


def register() -> None:
    """Makes torch know the backend. Done on import."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: _DistributedBackendOptions, _: Any) -> InterruptibleGroup:
    """Called by torch for the default group and each new_group. As with torch's gloo, a peer may take the whole timeout to come."""
    formed = connect_gloo(
        options.store,
        options.group_rank,
        options.group_size,
        hostname=address_for(options.store),
        connect_timeout=options.timeout,
        timeout=options.timeout,
    )
    group = InterruptibleGroup(formed)
    group._set_group_name(GroupName(options.group_id))
    return group


register()
inmemory.register()
mpi.register()
