"""Makes torch know init_method="redis://..." without importing torch, so that `import shoal` alone
is enough and stays quick.

torch has no plug-in for init methods: each is registered in torch.distributed.rendezvous. If that
module is loaded, it is told now, else at the moment it is. What the init method does is in
store/rendezvous.py, which is imported when it is used.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

SCHEMES: Final = ("redis", "rediss")
_MODULE: Final = "torch.distributed.rendezvous"
_log = logging.getLogger(__name__)


def register() -> None:
    """Makes torch know the schemes, now or when it is imported. Idempotent."""
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and hasattr(loaded, "register_rendezvous_handler"):
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    for scheme in SCHEMES:
        known = module._rendezvous_handlers.get(scheme)
        if known is None:
            module.register_rendezvous_handler(scheme, _rendezvous)
        elif known is not _rendezvous:
            _log.warning(
                "another package has registered the init method %s:// already; Shoal's is not "
                "available",
                scheme,
            )


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from shoal_worker.store.rendezvous import rendezvous

    return rendezvous(url, **options)


class _Finder(MetaPathFinder):
    """Stands before the others until torch's module is looked for, and lets them find it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register(module)

            # of this loader, which loads this module alone
            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
