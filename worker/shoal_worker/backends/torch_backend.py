"""`init_process_group("shoal_gloo")`: the same Gloo groups as torch's own default and sub-groups, for code that needs torch's world.

The name is not "gloo": torch ignores what is registered under a built-in name. Beyond torch's "gloo", these groups can be ended by
`abort_group` and let go of their sockets in forked children. Everything else is torch's: timeouts, new_group, destroy_process_group.
Importing this module registers the name.

torch keeps its groups in a table of the process; so does this module their sockets, by the group's name. Threads: any.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch.distributed as dist
from shoal_common.errors import UnknownResourceError
from torch._C._distributed_c10d import _DistributedBackendOptions

from shoal_worker.backends.forming import connect_gloo
from shoal_worker.backends.interface import address_for
from shoal_worker.backends.sockets import GroupSockets

NAME: Final = "shoal_gloo"

_SOCKETS: Final[dict[str, GroupSockets]] = {}
_LOCK: Final = threading.Lock()


def abort_group(group: dist.ProcessGroup | None = None) -> None:
    """Makes all operations of a `shoal_gloo` group (None: the default group) fail at once on this rank. Any thread.

    At its peers it fails what waits for this rank, so all ranks that are to be freed from a stuck one should call it. After it
    destroy_process_group is to be called, by the thread that issues collectives. Raises UnknownResourceError for other groups.
    """
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    with _LOCK:
        sockets = _SOCKETS.get(name)
    if sockets is None:
        raise UnknownResourceError(f"group {name!r} was not made with the backend {NAME!r}: only those can be aborted")
    sockets.shut_down()


def register() -> None:
    """Makes torch know the backend. Done on import."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: _DistributedBackendOptions, _: Any) -> dist.ProcessGroupGloo:
    """Called by torch for the default group and each new_group. As with torch's gloo, a peer may take the whole timeout to come."""
    group = connect_gloo(
        options.store,
        options.group_rank,
        options.group_size,
        hostname=address_for(options.store),
        connect_timeout=options.timeout,
        timeout=options.timeout,
    )
    with _LOCK:
        for name in [name for name, sockets in _SOCKETS.items() if not sockets.gloo_holds_any()]:
            _SOCKETS.pop(name).close()
        _SOCKETS[options.group_id] = group.sockets
    return group.backend


register()
