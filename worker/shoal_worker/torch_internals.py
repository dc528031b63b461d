"""All names that Shoal's worker imports from non-public modules of torch, in one place.

torch may rename or remove such names in any release. This module is imported before any of the
names is used. If the installed torch lacks a name, the import therefore fails with an error that
contains the name; otherwise, a later step would fail with an AttributeError. A torch newer than
`TESTED` is accepted with a warning.

Each name exists in all of `TESTED` and has no public counterpart there, with these exceptions:

    AllgatherOptions              importable from distributed_c10d, but not in its __all__
    queue_callback                public from 2.15 on: torch.autograd.graph.queue_callback
    all_gather_single, ...        from 2.13 on; under other names before, see _NATIVE_NAMES
    _FR_SELF_RECORDING_BACKENDS   from 2.15 on; earlier versions need nothing in its place
    enable_reconfigure            field of _DistributedBackendOptions, from 2.14 on. The same
                                  applies to torch's functions for reconfiguring a group, which
                                  call backends/gloo/reconfigurable.py: _supports_reconfigure,
                                  _get_reconfigure_handle, _reconfigure

`make test-torch VERSION=2.15.0` runs the tests with another torch, `make test-torches` with all.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from shoal_common.errors import ConfigurationError
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shoal_worker.torch_extensions import BACKENDS

TESTED: Final = ((2, 11), (2, 15))
"""Oldest and newest version of torch that Shoal's tests have run with."""
VERSION: Final = tuple(map(int, torch.__version__.split(".")[:2]))


def expected_versions() -> str:
    """Returns the tested versions for messages: "2.11 to 2.15"."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED)


def needs_torch(major: int, minor: int, what: str, instead: str) -> None:
    """Raises ConfigurationError if torch is older than version `major`.`minor`. `what`: the feature
    that needs this version. `instead`: the alternative for older versions."""
    if (major, minor) > VERSION:
        raise ConfigurationError(
            f"{what} needs torch {major}.{minor} or newer, but {torch.__version__} is installed; "
            f"update torch, or {instead}"
        )


def _unexpected(error: Exception) -> ImportError:
    return ImportError(
        f"Shoal is tested with torch {expected_versions()}, but torch {torch.__version__} is "
        f"installed and lacks a name that Shoal needs: {error}. Install a version in that range"
    )


if TESTED[1] < VERSION:
    warnings.warn(
        f"Shoal is tested with torch {expected_versions()}; torch {torch.__version__} is newer "
        "and may behave differently",
        stacklevel=2,
    )

try:
    from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id, _functorch

    # the stub lacks _set_thread_isolation_mode
    from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
        AllgatherOptions,
        _DistributedBackendOptions,
        _register_process_group,
        _set_thread_isolation_mode,
        _unregister_process_group,
    )
    from torch._dynamo import trace_rules
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
    from torch.utils import _pytree as pytree
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    _ = c10d._world  # all process groups of this process
    _is_in_bad_fork = torch.cuda._is_in_bad_fork
    _peek_interpreter_stack = _functorch.peek_interpreter_stack
    _NATIVE_NAMES = {
        name: name if hasattr(c10d.ProcessGroup, name) else earlier
        for name, earlier in {
            "all_gather_single": "_allgather_base",
            "all_to_all_single": "alltoall_base",
            "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
            "reduce_scatter_single": "_reduce_scatter_base",
            "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        }.items()
    }
    """Names of collectives in the installed torch's own groups, by their names in torch 2.13."""
    for _name in (
        *_NATIVE_NAMES.values(),
        # called where Shoal creates torch's own process groups
        "_device_types",
        "_register_backend",
        "_set_default_backend",
        "_set_group_name",
    ):
        getattr(c10d.ProcessGroup, _name)
    _queue_callback: Callable[[Callable[[], None]], None] = (
        torch.autograd.graph.queue_callback
        if hasattr(torch.autograd.graph, "queue_callback")
        else torch.autograd.Variable._execution_engine.queue_callback
    )
    if VERSION >= (2, 15):
        # Since 2.15 torch attaches a flight recorder to groups whose backends do not record
        # themselves. That fails for a group written in Python ("ProcessGroup name not set"), since
        # its C++ half has no name. torch recognizes that a group is written in Python only if the
        # group has no devices. Shoal's groups have devices, because object collectives need one for
        # their bytes.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS").update(BACKENDS)  # noqa: B009 - mypy has 2.13
except (ImportError, AttributeError) as error:
    raise _unexpected(error) from error

__all__ = [
    "TESTED",
    "AllgatherOptions",
    "DisableTorchFunctionSubclass",
    "FakeTensorMode",
    "_BatchNorm",
    "_DistributedBackendOptions",
    "_NormBase",
    "_StridedShard",
    "_global_optimizer_post_hooks",
    "_global_optimizer_pre_hooks",
    "_register_process_group",
    "_set_thread_isolation_mode",
    "_unregister_process_group",
    "after_backward",
    "asks_for_reconfigure",
    "c10d",
    "compute_local_shape_and_global_offset",
    "cuda_is_unusable",
    "function_modes",
    "in_backward",
    "in_function_transform",
    "gloo_options",
    "native_collective",
    "needs_torch",
    "pytree",
    "schedule_parts",
    "stage_backwards",
    "expected_versions",
    "uncompiled",
]


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
uncompiled: Callable[[_FunctionT], _FunctionT] = torch.compiler.disable
"""Decorator for functions that torch.compile leaves uncompiled. torch's own decorator has no type
annotations."""


if VERSION < (2, 12):
    # In these versions, the first use initializes process-wide state. If several ranks in threads
    # did so at the same time, torch would crash.
    with FakeTensorMode():
        pass

# torch.compile leaves Shoal's own code uncompiled. The user's modules that this code calls are
# still compiled, each separately, without Shoal's hooks around it.
trace_rules.add("shoal_worker")


def cuda_is_unusable() -> bool:
    """Returns whether torch refuses to use CUDA in this process, because the parent process called
    the CUDA runtime before it forked this one."""
    return bool(_is_in_bad_fork())


def native_collective(group: c10d.ProcessGroup, name: str) -> Callable[..., c10d.Work]:
    """Returns a collective method of one of torch's own process groups. `name`: the method's name
    in torch 2.13; in other versions, a method with a different name may be returned."""
    method: Callable[..., c10d.Work] = getattr(group, _NATIVE_NAMES.get(name, name))
    return method


def gloo_options() -> Any:
    """Returns new options of torch's ProcessGroupGloo."""
    # the stub calls the class Options
    return c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]


def asks_for_reconfigure(options: _DistributedBackendOptions) -> bool:
    """Returns whether a process group is created with `enable_reconfigure=True`."""
    return bool(getattr(options, "enable_reconfigure", False))


def in_function_transform() -> bool:
    """Returns whether this thread is inside a transform of torch.func, such as grad or vmap."""
    return _peek_interpreter_stack() is not None


def function_modes() -> list[TorchFunctionMode]:
    """Returns the torch function modes of this thread, outermost first."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


def in_backward() -> bool:
    """Returns whether this thread is in the middle of a backward pass. The forward pass of a
    checkpointed block may run again within it."""
    return _current_graph_task_id() >= 0


def after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` once, on this thread, when the current backward pass has ended."""
    _queue_callback(callback)


def stage_backwards() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns torch.distributed.pipelining's `stage_backward_input` and `stage_backward_weight`.

    Both are imported only when a pipeline needs them, because they import torch.export and the
    compiler, which takes most of a second.
    """
    try:
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )
    except ImportError as error:
        raise _unexpected(error) from error
    return stage_backward_input, stage_backward_weight


def schedule_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `_Action` and `_add_send_recv` of torch.distributed.pipelining.schedules. Both are
    imported only when a pipeline needs them, as in `stage_backwards`."""
    try:
        from torch.distributed.pipelining.schedules import _Action, _add_send_recv
    except ImportError as error:
        raise _unexpected(error) from error
    return _Action, _add_send_recv


def iterates_undealt_dataloader(*, longer_than: int) -> bool:
    """Returns whether an iteration is in progress over a torch DataLoader that has more than
    `longer_than` batches and a sampler that does not depend on the rank. Inspects all Python
    objects, in about 50 ms. Iterable datasets are ignored, because their number of batches is
    unknown."""
    for each in gc.get_objects():
        if issubclass(type(each), _BaseDataLoaderIter):
            batches = getattr(each, "_index_sampler", None)  # missing while it is being constructed
            if type(batches) is not BatchSampler:
                continue
            if type(batches.sampler) not in (RandomSampler, SequentialSampler):
                continue  # other samplers need not have a length
            if len(batches) > longer_than:
                return True
    return False


def scales(scaler: Any, optimizer: object) -> bool:
    """Returns whether a GradScaler has checked the gradients of `optimizer` since the scaler's last
    `update()`."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer))
    return bool(state and state.get("found_inf_per_device"))


def has_unscaled(scaler: Any) -> bool:
    """Returns whether a GradScaler has unscaled gradients that no optimizer has used yet."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    return any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in states)
