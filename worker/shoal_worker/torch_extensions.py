"""Registers Shoal's init methods (`redis://...`) and backends (`shoal_gloo`, ...) with torch,
without importing torch. `import shoal` is therefore sufficient, and stays fast.

torch has no plug-in mechanism for either, so the names are registered in two of torch's modules:
immediately if the module is already loaded, otherwise as soon as it is loaded. The code behind a
name is imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

INIT_METHODS: Final = {
    "redis": "shoal_worker.store.rendezvous:rendezvous",
    "rediss": "shoal_worker.store.rendezvous:rendezvous",
    "mpi": "shoal_worker.backends.mpi.backend:rendezvous",
}
"""Rendezvous functions, as "module:name", by the scheme of the URL."""
BACKENDS: Final = {
    "shoal_gloo": ("shoal_worker.backends.gloo.backend:create_group", ("cpu",)),
    "shoal_inmemory": ("shoal_worker.backends.inmemory.backend:create_group", ("cpu", "cuda")),
    "shoal_mpi": ("shoal_worker.backends.mpi.backend:create_group", ("cpu",)),
}
"""Functions that create process groups, as "module:name", and the device types of their tensors, by
backend name. (None of the names is "gloo", because torch ignores backends that are registered under
the name of one of its own.)"""

_log = logging.getLogger(__name__)


def register() -> None:
    """Registers Shoal's names with torch, now or when torch is imported. Idempotent."""
    later: dict[str, Callable[[ModuleType], None]] = {}
    for name, extend in _EXTENSIONS.items():
        module = sys.modules.get(name)
        if module is not None:
            extend(module)
        else:
            later[name] = extend
    if later and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(later))


def _register_init_methods(module: ModuleType) -> None:
    for scheme, home in INIT_METHODS.items():
        known = module._rendezvous_handlers.get(scheme)
        if known is None:
            module.register_rendezvous_handler(scheme, _Deferred(home))
        elif known != _Deferred(home):
            _log.warning(
                "another package has already registered the init method %s://, so Shoal's own is "
                "not available",
                scheme,
            )


def _register_backends(module: ModuleType) -> None:
    for name, (home, devices) in BACKENDS.items():
        if name not in module.Backend.backend_list:
            module.Backend.register_backend(
                name, _Deferred(home), extended_api=True, devices=list(devices)
            )


_EXTENSIONS: Final = {
    "torch.distributed.rendezvous": _register_init_methods,
    "torch.distributed.distributed_c10d": _register_backends,
}
"""Modules of torch, each with the function that registers Shoal's names in it."""


class _Deferred:
    """Function that is imported when it is first called."""

    def __init__(self, home: str) -> None:
        self._home = home

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Deferred) and other._home == self._home

    def __hash__(self) -> int:
        return hash(self._home)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        module, _, name = self._home.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments, **options)


class _Finder(MetaPathFinder):
    """Import finder that calls a function when one of certain modules has been loaded. It leaves
    finding the modules to the other finders."""

    def __init__(self, awaited: dict[str, Callable[[ModuleType], None]]) -> None:
        self._awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        extend = self._awaited.pop(fullname, None)
        if extend is None:
            return None
        if not self._awaited:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                extend(module)

            # affects only this module, because each module has its own loader
            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
