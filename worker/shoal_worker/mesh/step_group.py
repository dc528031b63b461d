"""What torch's tensor-parallel code gets of a part of a generation's group: a DeviceMesh and a
process group under a name of its own.

torch finds groups by their names in a world that a process has one of; a generation's groups come
and go, and are in no such world. Layers cut over ranks communicate in the middle of a forward or
backward pass, which may be the user's. So a collective that fails in a step does not raise there:
its result is zeros, the step is marked lost, and `optimizer.step()` says so. Between steps it
raises.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.strategy_interface import StrategySession
from shoal_worker.engine.failed_collectives import come_after
from shoal_worker.torch_internals import _register_process_group, _unregister_process_group, pytree

_NUMBERS: Final = itertools.count(1)


class StepGroup(ForwardingGroup):
    """Forwards to the process group of `group`, for a session's steps. A failure is told to the
    step; where there is none it is raised."""

    backend_name: ClassVar[str] = "shoal_step"

    def __init__(self, group: Group, session: StrategySession) -> None:
        super().__init__(group.rank, group.world_size, f"shoal_step_{next(_NUMBERS)}")
        self._group = group
        self._session = session

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._group.device]

    def failed(self, error: MembershipChanged) -> None:
        """Ends the group for all. Raises `error` outside of a step."""
        self._group.abort(str(error))
        if self._session.step is None:
            raise error
        self._session.mark_lost(error)

    def come_after(self, work: Work) -> None:
        """See `failed_collectives.come_after`."""
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
    """A collective whose failure is told to the step."""

    def __init__(self, work: Work | None, group: StepGroup, outputs: Any) -> None:
        """None: it has failed."""
        super().__init__()
        self._work, self._group, self._outputs = work, group, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when there is a result, of whatever kind. Raises MembershipChanged outside of a
        step."""
        work, self._work = self._work, None
        if work is not None:
            try:
                # torch gives 0 for no timeout. By whole numbers the host may go, or they are
                # indices.
                if not timeout and all(one.is_floating_point() for one in self.result()):
                    self._group.come_after(work)
                else:
                    work.wait(timeout) if timeout else work.wait()
            except MembershipChanged as error:
                self._group.failed(error)
                _blank(self._outputs)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether there is a result, of whatever kind."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Waits for the collective, as `wait` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return [one for one in pytree.tree_leaves(self._outputs) if isinstance(one, torch.Tensor)]

    def get_future(self) -> torch.futures.Future[Any]:
        """Waits, and gives a complete future of the output tensors."""
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
    """A mesh of one dimension over a process group that is in nobody's world. Its ranks are the
    group's.

    No two are equal, whatever ranks they have: DTensor caches by mesh. Its caches keep meshes for
    ever; neither these nor their groups hold anything of a model.
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
        """torch forgets the group."""
        self._pg_registry.clear()
        _unregister_process_group(self._step_group.group_name)
