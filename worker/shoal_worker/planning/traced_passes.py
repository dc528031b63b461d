"""Runs a forward and a backward pass on fake tensors. Records the memory that autograd keeps, the
inputs and outputs of modules, and the number of operations.

The passes run under torch's FakeTensorMode, as if on the CPU: shapes and storages are the same as
in a real run, but no values are computed. Additional memory for a GPU's kernels (workspaces,
different attention kernels) is not included. Modules with activation checkpointing keep only their
inputs, and their operations are included twice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle

from shoal_worker.engine.state.parameter_groups import own_forward
from shoal_worker.engine.step.passes import Loss, call_module, loss_of
from shoal_worker.pipelining.micro_batches import Call, tensors_in
from shoal_worker.tensor_parallel.split_plan import Style, TensorParallelPlan
from shoal_worker.torch_internals import FakeTensorMode, pytree


def _as(known: Any) -> Callable[..., Any]:
    """Returns a counter of operations for a function that has as many as `known`, a torch function
    with the same first arguments."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        return flop_registry[known](*args, **kwargs)

    # torch's mark for a counter that gets tensors instead of shapes
    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


_CPU_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _as(
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _as(
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Counters for functions that torch's own counter does not support."""
_ENTERING: Final = (Style.COLUMN, Style.PACKED_COLUMN, Style.COLUMN_GATHERED, Style.ATTENTION)


@dataclass(kw_only=True)
class ModulePass:
    """Inputs, outputs and operations of one module, summed over all of its calls."""

    input_bytes: int = 0
    """Size of the module's first input tensor, in bytes."""
    input_needs_gradient: bool = False
    output_bytes: int = 0
    """Size of the module's first output tensor, in bytes."""
    inputs: set[int] = field(default_factory=set)
    """Identities of the input tensors' storages."""
    outputs: set[int] = field(default_factory=set)
    flops: int = 0
    """Number of operations of the forward pass, including nested modules."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A storage that autograd keeps for the backward pass."""

    storage: int
    size: int
    """Size in bytes."""
    module: str
    """Path of the module that used the storage first; the innermost one if modules are nested. ""
    is the model itself, or the loss."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Measurements of one forward and backward pass of a model on an example."""

    samples: int
    forward_flops: int
    flops: int
    """Number of operations of the forward and the backward pass together."""
    saved: tuple[Saved, ...]
    recomputed: tuple[Saved, ...]
    """Memory that autograd keeps temporarily while a module with activation checkpointing is
    recomputed, for the module that needs the most. Empty if there is no such module."""
    modules: Mapping[str, ModulePass]

    def io_of(self, *paths: str) -> ModulePass:
        """Returns the record of the first module in `paths` that was called, or an empty record if
        none was called. Some modules are used without being called."""
        return next((self.modules[path] for path in paths if path in self.modules), ModulePass())

    def flops_of(self, names: Sequence[str]) -> int:
        """Returns the number of operations in the forward passes of these modules."""
        return sum(self.io_of(name).flops for name in names)

    def kept_at_most(self, plan: TensorParallelPlan | None = None) -> float:
        """Returns the maximum number of bytes that autograd keeps on a rank, including the memory
        that it keeps while a module is recomputed."""
        return sum(self.kept(plan).values()) + sum(self.kept(plan, self.recomputed).values())

    def kept(
        self, plan: TensorParallelPlan | None = None, saved: Sequence[Saved] | None = None
    ) -> dict[str, float]:
        """Returns the bytes of `saved`, by module. By default, `saved` is everything that autograd
        keeps from the forward to the backward pass.

        With a `plan`, tensors inside tensor-parallel blocks are split, so only the part on one rank
        is included. A block's input and its summed output are included in full, because every rank
        has them.
        """
        split, whole = (set[str](), set[int]()) if plan is None else self._split_in(plan)
        kept: dict[str, float] = {}
        for each in self.saved if saved is None else saved:
            parts = (
                plan.size
                if plan is not None and each.storage not in whole and _within(each.module, split)
                else 1
            )
            kept[each.module] = kept.get(each.module, 0.0) + each.size / parts
        return kept

    def _split_in(self, plan: TensorParallelPlan) -> tuple[set[str], set[int]]:
        blocks = {
            entry.block for entry in plan.entries if entry.style in (Style.ROW, Style.ATTENTION)
        }
        whole: set[int] = set()
        for entry in plan.entries:
            if entry.style in _ENTERING:
                whole |= self.io_of(entry.module).inputs
            if entry.style is Style.ROW:
                whole |= self.io_of(entry.module).outputs
        return blocks, whole


def _within(module: str, paths: set[str]) -> bool:
    return any(module == path or module.startswith(f"{path}.") for path in paths)


def measure(module: nn.Module, inputs: Any, targets: Any, loss_fn: Loss | None) -> Passes:
    """Runs the passes of `module`, whose tensors may be on the meta device.

    Args:
        module: the complete model.
        inputs, targets, loss_fn: arguments of `train_step`; the values do not matter. Without
            `loss_fn`, the loss is the output's `.loss` or the mean of the output.

    Raises:
        ConfigurationError: the model cannot be run in this way.
    """
    samples = next(
        (
            len(t)
            for t in tensors_in([*Call.of(inputs).args, *Call.of(inputs).kwargs.values()])
            if t.dim()
        ),
        None,
    )
    if not samples:
        raise ConfigurationError(
            f"example={type(inputs).__name__}: expected the model's inputs, including a tensor "
            "with one row per sample"
        )
    try:
        return _run(module, inputs, targets, loss_fn, samples)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__} could not be run with fake tensors, which have the example's "
            f"shapes but no values: {type(error).__name__}: {error}. If the model's code depends "
            "on values, or the model has tensors that are neither parameters nor buffers, plan "
            "without an example; the plan then omits activations and times"
        ) from error


def _run(
    module: nn.Module, inputs: Any, targets: Any, loss_fn: Loss | None, samples: int
) -> Passes:
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = _Step(module)
        state = {
            name: _blank(tensor)
            for name, tensor in [*step.named_parameters(), *step.named_buffers()]
        }
        given, wanted = pytree.tree_map_only(torch.Tensor, _blank, (inputs, targets))
        counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        recorder = _Recorder(counter, state.values())
        with torch.enable_grad(), counter:
            forward, recomputed = torch.func.functional_call(
                step, state, (given, wanted, loss_fn, recorder)
            )
        return Passes(
            samples=samples,
            forward_flops=forward,
            flops=counter.get_total_flops() - recorder.beside,
            saved=tuple(recorder.saved.values()),
            recomputed=recomputed,
            modules=recorder.modules,
        )


class _Step(nn.Module):
    """The forward pass, the loss and the backward pass as one callable. During a call, including
    recomputation, other tensors stand in for the model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Any, targets: Any, loss_fn: Loss | None, recorder: _Recorder
    ) -> tuple[int, tuple[Saved, ...]]:
        """Runs the passes. Returns the number of operations of the forward pass, and the memory
        that autograd keeps while the largest checkpointed module is recomputed."""
        with (
            recorder.hooked(self.model),
            torch.autograd.graph.saved_tensors_hooks(recorder.keep, _same),
        ):
            loss = _loss(call_module(self.model, inputs), targets, loss_fn)
            forward = recorder.counted
            recomputed = recorder.largest_recomputed()
        recorder.beside = recorder.counted - forward
        loss.backward()
        return forward, recomputed


def _loss(output: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
    has_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss_fn is not None or isinstance(has_loss, torch.Tensor):
        return loss_of(output, targets, loss_fn)
    found = [
        t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not found:
        raise ConfigurationError(
            f"the model returned {type(output).__name__} without a tensor that has a gradient, so "
            "there is nothing to train"
        )
    return torch.stack([t.float().mean() for t in found]).sum()


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Recorder:
    """Records the modules' operations and the memory that autograd keeps. May be used only by the
    thread that runs the passes."""

    def __init__(self, counter: FlopCounterMode, own: Any) -> None:
        """`own`: the model's parameters and buffers, which are not recorded as activations."""
        self.modules: dict[str, ModulePass] = {}
        self.saved: dict[int, Saved] = {}
        self.beside = 0
        """Number of counted operations that do not belong to either pass."""
        self._counter = counter
        self._checkpointed: dict[tuple[type, int], tuple[str, Callable[..., Any], Any, Any]] = {}
        """One module of each class and size that recomputes its activations: its path, original
        forward method, and arguments."""
        self._own = {_storage(tensor) for tensor in own}
        self._alive: list[torch.Tensor] = []
        """All tensors seen so far. They are kept alive, so that a new storage never gets the
        identity of a freed one."""
        self._open: list[tuple[str, int]] = []
        """Modules that are currently running, each with the number of operations counted before it
        started."""

    @property
    def counted(self) -> int:
        """Number of operations counted so far."""
        return self._counter.get_total_flops()

    @contextlib.contextmanager
    def hooked(self, module: nn.Module) -> Iterator[None]:
        """Context in which passes through the modules are recorded."""
        handles: list[RemovableHandle] = []
        for path, inner in module.named_modules():
            handles.append(inner.register_forward_pre_hook(self._before(path), with_kwargs=True))
            handles.append(inner.register_forward_hook(self._after(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Records that autograd keeps `tensor`."""
        storage = _storage(tensor)
        if storage not in self._own and storage not in self.saved:
            self._alive.append(tensor)
            path = self._open[-1][0] if self._open else ""
            self.saved[storage] = Saved(
                storage=storage, size=tensor.untyped_storage().nbytes(), module=path
            )
        return tensor

    def largest_recomputed(self) -> tuple[Saved, ...]:
        """Returns the memory that autograd keeps while a module is recomputed, for the module that
        needs the most. Must be called within `hooked`."""
        kept, modules = self.saved, self.modules
        largest: dict[int, Saved] = {}
        for path, forward, args, kwargs in self._checkpointed.values():
            self.saved, self.modules = {}, {}
            self._open.append((path, self.counted))
            forward(*args, **kwargs)
            self._open.pop()
            for inner, own in self.modules.items():
                # within a checkpoint, they have already been seen, with different storages
                if inner in modules:
                    modules[inner].inputs |= own.inputs
                    modules[inner].outputs |= own.outputs
            largest = max(
                largest, self.saved, key=lambda saved: sum(each.size for each in saved.values())
            )
        self.saved, self.modules = kept, modules
        return tuple(largest.values())

    def _before(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            original = own_forward(module)
            if original is not None:
                kind = type(module), sum(p.numel() for p in module.parameters())
                self._checkpointed.setdefault(kind, (path, original, args, kwargs))
            first = next(tensors_in([*args, *kwargs.values()]), None)
            own = self.modules.setdefault(path, ModulePass())
            if first is not None:
                self._alive.append(first)
                own.input_bytes += first.nbytes
                own.input_needs_gradient = own.input_needs_gradient or first.requires_grad
                own.inputs.add(_storage(first))
            self._open.append((path, self.counted))

        return note

    def _after(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            before = self._open.pop()[1]
            own = self.modules[path]
            own.flops += self.counted - before
            first = next(tensors_in(output), None)
            if first is not None:
                self._alive.append(first)
                own.output_bytes += first.nbytes
                own.outputs.add(_storage(first))

        return note


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def scaled(amount: float, samples: float, passes: Passes) -> float:
    """Scales `amount`, which was measured with the example, to `samples` samples."""
    return amount * math.ceil(samples) / passes.samples
