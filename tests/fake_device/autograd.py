"""Backward passes as on CUDA: they run on one of autograd's threads while the caller of `backward`
waits.

Hooks, callbacks and recomputed checkpoints run on that thread. torch copies some thread-local state
to it (grad mode, torch function modes), but not Python's thread-locals. On the host, torch has no
such thread, so this module starts one for each pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from shoal_worker.backends import worlds
from shoal_worker.torch_internals import _register_process_group, function_modes

from tests.fake_device.library import in_threads


class _Thread(threading.local):
    in_a_pass = False


_thread = _Thread()


@contextlib.contextmanager
def passes_on_threads_of_autograd() -> Iterator[Callable[[], int]]:
    """Runs backward passes on other threads while the context is open. Yields a function that
    returns the number of these passes."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward
    passes: list[None] = []

    def run_elsewhere(*arguments: Any, **options: Any) -> Any:
        if _thread.in_a_pass:  # a nested pass uses the thread of the outer one
            return run(*arguments, **options)
        modes, grad = function_modes(), torch.is_grad_enabled()

        def run_here() -> Any:
            _thread.in_a_pass = True
            _know_groups()
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad))
                for mode in modes:
                    stack.enter_context(mode)
                return run(*arguments, **options)

        passes.append(None)
        (outcome,) = in_threads([run_here])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_elsewhere):
        yield lambda: len(passes)


def _know_groups() -> None:
    """Registers the rank's groups by name for this thread. If ranks are threads, torch keeps the
    names per rank."""
    world = worlds.own_world()
    for group, name in world.pg_names.items() if world is not None else ():
        _register_process_group(name, group)
