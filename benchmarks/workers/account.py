"""Measures the memory that one rank uses under a strategy, by purpose; the peak of its allocations;
and the bytes that it sends.

`shoal run ... -m benchmarks.workers.account --strategy zero2 --output DIR` writes DIR/<rank>.json.

Memory is the size of distinct storages. Parameters and optimizer state are measured between two
steps. Gradients are measured after the backward pass and when the optimizer is about to update, and
the larger value is used. Mirrors of other ranks' shards are listed separately.

The peak is the largest sum of live allocations of torch's CPU allocator on the training thread, as
reported by torch's profiler, during the measured steps. It does not include memory that Gloo
allocates for itself. Sent bytes are read from the sockets between steps (`wire.py`). Bytes sent to
mirrors are the difference of two such readings, before and after the call that sends them.
"""

from __future__ import annotations

import bisect
import functools
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import shoal
import torch
from shoal_worker.engine.state.hidden_parameters import gradient_of, inside
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.workers import blocks
from benchmarks.workers.train_strategy import add_strategy, take_pass
from benchmarks.workers.wire import traffic
from benchmarks.workers.workload import Workload

_COUNTED: Final = "the steps that count begin"


class Wired:
    """Counts the bytes that are sent during calls of wrapped functions."""

    def __init__(self) -> None:
        self.sent = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a wrapper of `function` that counts the bytes sent during each call. No other
        part of this process may send during the call."""

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            before = traffic().sent
            result = function(*arguments, **named)
            self.sent += traffic().sent - before
            return result

        return counted


class Live:
    """Total size of the live allocations. Frees by other threads are not reported. An allocation
    that overlaps a new one must have been freed, and is therefore removed."""

    def __init__(self) -> None:
        self.bytes = 0
        self._begins: list[int] = []
        self._sizes: dict[int, int] = {}

    def changed(self, address: int, size: int) -> None:
        """Records that `size` bytes were allocated at `address`. A negative size records that the
        allocation at this address was freed."""
        if size < 0:
            self._free(address)
            return
        while (at := bisect.bisect_left(self._begins, address + size)) and self._ends(
            self._begins[at - 1]
        ) > address:
            self._free(self._begins[at - 1])
        bisect.insort(self._begins, address)
        self._sizes[address] = size
        self.bytes += size

    def _ends(self, address: int) -> int:
        return address + self._sizes[address]

    def _free(self, address: int) -> None:
        size = self._sizes.pop(address, None)
        if size is not None:
            self.bytes -= size
            del self._begins[bisect.bisect_left(self._begins, address)]


def main() -> None:
    """Trains for some steps, then measures during further steps."""
    options = _options()
    workload = Workload(
        log=options.output, ranks=options.ranks, width=options.width, batch=options.batch
    )
    mirrored = Wired()
    _count_mirroring(mirrored)
    shoal.init()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        account = _train(options, workload, mirrored)
    account["peak"] = _peak_bytes(profiler)
    account["rank"] = shoal.rank()
    (options.output / f"{shoal.rank()}.json").write_text(json.dumps(account))


def _options() -> Namespace:
    import argparse

    flags = argparse.ArgumentParser()
    add_strategy(flags)
    flags.add_argument("--output", type=Path, required=True)
    for name in ("ranks", "replicas", "width", "batch", "steps"):
        flags.add_argument(f"--{name}", type=int, required=True)
    return flags.parse_args()


def _train(options: Namespace, workload: Workload, mirrored: Wired) -> dict[str, Any]:
    net = blocks.network(workload)
    inner = blocks.optimizer_of(net)
    names = {id(p) for p in net.parameters()}
    account: dict[str, Any] = {
        "model": sum(p.numel() * p.element_size() for p in net.parameters()),
        "tensors": len(names),
    }
    model, optimizer = shoal.as_distributed(
        net, inner, strategy=options.strategy, **options.options
    )
    before_update(inner, lambda: _note_gradients(account, model, inner))
    sizes = (
        {"batch_size": workload.batch}
        if options.strategy == "async_sgd"
        else {"global_batch_size": workload.batch * options.replicas}
    )
    loader = shoal.ElasticDataLoader(blocks.dataset(workload), **sizes)
    done, before, before_mirrored = 0, traffic(), 0
    for _ in loader.epochs(blocks.MANY_EPOCHS):
        for inputs, labels in loader:
            take_pass(model, options.strategy, inputs, labels)
            _note_gradients(account, model, inner)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == options.steps:
                with record_function(_COUNTED):
                    pass
                before, before_mirrored = traffic(), mirrored.sent
            if done == 2 * options.steps:
                counted = traffic().since(before)
                account["sent"] = counted.sent / options.steps
                account["received"] = counted.received / options.steps
                account["sent_to_mirrors"] = (mirrored.sent - before_mirrored) / options.steps
                return account | _at_rest(model, inner)
    raise AssertionError("the loader has more epochs than that")


def before_update(inner: Any, call: Callable[[], object]) -> None:
    """Makes the user's optimizer `inner` call `call` before each update. Wraps `step`, because
    Shoal refuses step hooks if the optimizer updates only shards."""
    step = inner.step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        call()
        return step(*args, **kwargs)

    inner.step = noted


def _at_rest(model: Any, inner: torch.optim.Optimizer) -> dict[str, int]:
    own, mirrors = _pieces(model)
    mirror_ids = {id(p) for p in mirrors}
    updated = [
        p for group in inner.param_groups for p in group["params"] if id(p) not in mirror_ids
    ]
    owned = _storages([*model.module.parameters(), *own, *updated])
    held_for_others = {key: size for key, size in _storages(mirrors).items() if key not in owned}
    states = {True: 0, False: 0}
    for parameter, state in inner.state.items():
        tensors = [t for t in state.values() if isinstance(t, torch.Tensor)]
        states[id(parameter) in mirror_ids] += sum(_storages(tensors).values())
    return {
        "parameters": sum(owned.values()),
        "optimizer": states[False],
        "mirrored_parameters": sum(held_for_others.values()),
        "mirrored_optimizer": states[True],
    }


def _note_gradients(account: dict[str, Any], model: Any, inner: torch.optim.Optimizer) -> None:
    own, mirrors = _pieces(model)
    mirror_ids = {id(p) for p in mirrors}
    updated = [
        p for group in inner.param_groups for p in group["params"] if id(p) not in mirror_ids
    ]
    for role, parameters in (
        ("gradients", [*model.module.parameters(), *own, *updated]),
        ("mirrored_gradients", mirrors),
    ):
        now = sum(_storages(g for g in map(gradient_of, parameters) if g is not None).values())
        account[role] = max(account.get(role, 0), now)


def _pieces(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the tensors that the optimizer of a sharded strategy updates, in two lists: those of
    this rank's own shard, and those of the shards that it mirrors. No public interface
    distinguishes them."""
    from shoal_worker.mesh.data_axis import InShards
    from shoal_worker.mesh.engine import MeshEngine
    from shoal_worker.sharding.engine import ShardedEngine

    units: Sequence[Any] = ()
    if isinstance(model.engine, ShardedEngine):
        units = model.engine._held.units
    elif isinstance(model.engine, MeshEngine):
        data_axis = model.engine._held.data_axis
        units = data_axis.units if isinstance(data_axis, InShards) else ()
    return [p for unit in units for p in unit.own.pieces], [
        p for unit in units for p in unit.mirror.pieces
    ]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Returns the size in bytes of each storage, by its address. Tensors that share a storage are
    counted once. Of a parameter that is distributed over ranks, only the part on this rank is
    counted."""
    with inside():
        local = [getattr(t, "_local_tensor", t) for t in tensors if not t.is_meta]
        return {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in local
            if t.untyped_storage().nbytes()
        }


def _count_mirroring(mirrored: Wired) -> None:
    from shoal_worker.sharding.gradients import CutGradients

    # When it is called no other collective is on its way.
    # counts, and changes nothing
    CutGradients.pass_on = mirrored.around(CutGradients.pass_on)  # type: ignore[method-assign]


def _peak_bytes(profiler: profile) -> int:
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes, begins = [], 0
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            changes.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
        elif event.name == _COUNTED:
            begins = event.start_time_ns
    live, highest = Live(), 0
    for time_ns, address, size in sorted(changes):
        live.changed(address, size)
        if time_ns > begins:
            highest = max(highest, live.bytes)
    return highest


if __name__ == "__main__":
    main()
