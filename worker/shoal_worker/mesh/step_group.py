"""DeviceMesh and process group, with a unique name, through which torch's tensor-parallel code uses
a subgroup of a generation's group.

torch finds groups by name in the single torch.distributed world of the process, but a generation's
groups are short-lived and do not belong to that world. Tensor-parallel layers communicate in the
middle of a forward or backward pass, possibly in the user's own code. If a collective fails within
a step, no error is raised. Instead, the result is zeros, the step is marked as failed, and
`optimizer.step()` returns LOST. Between steps, the error is raised.
"""

from __future__ import annotations

import itertools
import weakref
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.engine.step.failed_collectives import come_after
from shoal_worker.torch_internals import _register_process_group, _unregister_process_group, pytree

_NUMBERS: Final = itertools.count(1)


class StepGroup(ForwardingGroup):
    """Process group that forwards collectives to the process group of `group`. A failure marks the
    session's current step as failed; outside of a step, it raises an error.

    torch's caches keep this object forever, so it has only weak references to the session and the
    group. Once the group no longer exists, collectives fail.
    """

    backend_name: ClassVar[str] = "shoal_step"

    def __init__(self, group: Group, session: StrategySession) -> None:
        super().__init__(group.rank, group.world_size, f"shoal_step_{next(_NUMBERS)}")
        self._held_group = weakref.ref(group)
        self._device = group.device
        self._session: StrategySession = weakref.proxy(session)

    @property
    def _group(self) -> Group:
        """Group that collectives are forwarded to. Raises MembershipChanged if it no longer
        exists."""
        group = self._held_group()
        if group is None:
            raise MembershipChanged("this process group belongs to a generation that is over")
        return group

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def failed(self, error: MembershipChanged) -> None:
        """Aborts the group on all ranks because of `error`. Marks the current step as failed;
        outside of a step, raises `error`."""
        group = self._held_group()
        if group is not None:
            group.abort(str(error))
        if self._session.step is None:
            raise error
        self._session.lifecycle.mark_lost(error)

    def come_after(self, work: Work) -> None:
        """Implements `failed_collectives.come_after`."""
        come_after(self._session, self._group, work)

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        try:
            return StepWork(
                getattr(self._group.process_group, name)(*arguments, **options), self, arguments[0]
            )
        except MembershipChanged as error:
            self.failed(error)
            _blank(arguments[0])
            return StepWork(None, self, arguments[0])


class StepWork(Work):
    """Work of a collective. A failure marks the current step as failed."""

    def __init__(self, work: Work | None, group: StepGroup, outputs: Any) -> None:
        """Wraps `work`, which is None if the collective has already failed."""
        super().__init__()
        self._work, self._group, self._outputs = work, group, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the result, which is valid unless the step has failed. Outside of a step, a
        failure raises MembershipChanged."""
        work, self._work = self._work, None
        if work is not None:
            try:
                # torch passes 0 for no timeout. The host may continue before the result has
                # arrived, unless the result contains integers, which may be used as indices.
                if not timeout and all(one.is_floating_point() for one in self.result()):
                    self._group.come_after(work)
                else:
                    work.wait(timeout) if timeout else work.wait()
            except MembershipChanged as error:
                self._group.failed(error)
                _blank(self._outputs)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return immediately."""
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Returns whether there is a result. If the step has failed, the result is invalid."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Waits for the collective, like `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors."""
        return [one for one in pytree.tree_leaves(self._outputs) if isinstance(one, torch.Tensor)]

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits, and returns a completed future with the output tensors."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


def _blank(outputs: Any) -> None:
    with torch.no_grad():
        for one in pytree.tree_leaves(outputs):
            if isinstance(one, torch.Tensor):
                one.data.zero_()


class GroupMesh(DeviceMesh):
    """One-dimensional mesh on a process group that does not belong to a torch.distributed world.
    Its ranks are the ranks of the group.

    No two meshes are equal, even with the same ranks, because DTensor caches by mesh. DTensor's
    caches keep meshes, and therefore their groups, forever (`StepGroup`).
    """

    def __init__(self, group: StepGroup, device_type: str) -> None:
        super().__init__(
            device_type, torch.arange(group.size()), _init_backend=False, _rank=group.rank()
        )
        name = group.group_name
        self._step_group = group
        self._dim_group_names = [name]
        self._pg_registry[name] = group
        self._thread_id = -next(_NUMBERS)
        self._hash = None
        _register_process_group(name, group)

    @override
    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        return self._step_group

    @override
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._rank

    def release(self) -> None:
        """Removes the group from torch's registries."""
        self._pg_registry.clear()
        _unregister_process_group(self._step_group.group_name)
