"""Gloo: collectives over TCP, for CPU clusters, with an abort that releases every waiting rank
within a fraction of a second.

Gloo's own abort and shutdown do nothing, and a rank that waits for a stuck peer waits until its
timeout. Here, an abort breaks the group's own connections (sockets.py) and ends this rank's waits
on them (interruptible.py). On the peers, waits for this rank fail immediately. A peer's other waits
fail once its watch thread has noticed the broken connection and sockets.GRACE_S has passed. The
same happens when a rank dies. When a group ends on one rank, it therefore ends on all ranks. To
exit without an error on its peers, a rank leaves after a collective of all ranks.

`init_process_group("shoal_gloo")` makes such groups torch's default group and sub-groups, for code
that needs torch's world (torch_extensions.py). With `enable_reconfigure=True`, the group's ranks
can change (reconfigurable.py). Unlike torch's "gloo", these groups can be aborted from any thread
with `group.abort()` (`torch.distributed.group.WORLD.abort()`), and they release their sockets in
forked children. Such an abort ends the group on this rank, and ends the peers' waits for this rank.
Unlike the group of a GlooBackend, such a group does not end by itself when a peer leaves, because a
script may continue with the remaining ranks. Timeouts, new_group and destroy_process_group work as
in torch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, Store
from typing_extensions import override

from shoal_worker.backends.base import CommunicationBackend, Traffic
from shoal_worker.backends.gloo.forming import FormingGroup, connect_gloo
from shoal_worker.backends.gloo.interruptible import InterruptibleGroup
from shoal_worker.backends.gloo.reconfigurable import ReconfigurableGroup
from shoal_worker.backends.gloo.sockets import address_for
from shoal_worker.store.redis_store import RedisStore
from shoal_worker.torch_internals import _DistributedBackendOptions, asks_for_reconfigure


class GlooBackend(CommunicationBackend):
    """Backend with a Gloo group of its own. Supports CPU tensors, and CUDA tensors by way of host
    memory."""

    name: ClassVar[str] = "gloo"
    averages_natively: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._forming: FormingGroup | None = None
        self._group: InterruptibleGroup | None = None
        self._store: Store | None = None
        """Keeps the store alive, because the group refers only to the C++ half of a store written
        in Python."""

    def _connect(
        self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        forming = FormingGroup(
            store,
            self.rank,
            self.world_size,
            hostname=hostname or address_for(store),
            connect_timeout=connect_timeout,
            timeout=timeout,
            short_sums=self._members is None,  # groups of some of the run's ranks commit no steps
        )
        self._forming = forming
        if self._reason is not None:
            forming.give_up(self._reason)
        try:
            with (
                store.on_abort(forming.give_up)
                if isinstance(store, RedisStore)
                else contextlib.nullcontext()
            ):
                formed = forming.wait()
        finally:
            self._forming = None
        reference = weakref.ref(self)

        def ended(reason: str) -> None:
            backend = reference()
            if backend is not None:
                backend.abort(reason)

        group = InterruptibleGroup(formed, ended, self.waits)
        self._group, self._store = group, store
        group.watch()
        return group

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Implements `CommunicationBackend.all_reduce_short` with messages that the training thread
        sends and receives itself, without involving Gloo's threads."""
        group = self.process_group
        assert isinstance(group, InterruptibleGroup)
        group.all_reduce_short(tensor)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Implements `CommunicationBackend.sum_numbers`, in the same way as `all_reduce_short`."""
        group = self.process_group
        assert isinstance(group, InterruptibleGroup)
        return group.sum_numbers(values)

    @override
    def traffic(self) -> dict[str, Traffic]:
        group = self._group
        return group.traffic() if group is not None else {}

    def _break(self) -> None:
        forming, group, reason = self._forming, self._group, self._reason
        assert reason is not None
        if forming is not None:
            forming.give_up(reason)
        if group is not None:
            group.abort(reason)

    def _release(self) -> None:
        group, self._group = self._group, None
        self._process_group = self._store = None
        if group is not None:
            group.shutdown()

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group itself raises MembershipChanged


def create_group(
    options: _DistributedBackendOptions, _: Any
) -> InterruptibleGroup | ReconfigurableGroup:
    """Creates the default group or a group for new_group. Called by torch. As with torch's gloo,
    the timeout also limits connecting."""
    if asks_for_reconfigure(options):
        return ReconfigurableGroup(
            options.store,
            options.group_rank,
            options.group_size,
            GroupName(options.group_id),
            options.timeout,
        )
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
