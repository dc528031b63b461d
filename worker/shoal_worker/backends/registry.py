"""Registry of the backends by name. Each is imported on first use. A new backend needs a module and
an entry here."""

from __future__ import annotations

import importlib
from typing import Final

from shoal_common.errors import ConfigurationError

from shoal_worker.backends.base import CommunicationBackend

_BACKENDS: Final = {
    "gloo": "shoal_worker.backends.gloo.backend:GlooBackend",
    "inmemory": "shoal_worker.backends.inmemory.backend:InMemoryBackend",
    "mpi": "shoal_worker.backends.mpi.backend:MPIBackend",
    "nccl": "shoal_worker.backends.nccl.backend:NCCLBackend",
}


def backend_names() -> list[str]:
    """Returns the names of all backends, which are the values that `backend=` accepts."""
    return sorted(_BACKENDS)


def backend_class(name: str) -> type[CommunicationBackend]:
    """Returns the backend class called `name`. Raises ConfigurationError, whose message lists the
    known backends, if there is none."""
    try:
        module, _, attribute = _BACKENDS[name].partition(":")
    except KeyError:
        raise ConfigurationError(
            f"backend={name!r}: expected one of {', '.join(backend_names())}"
        ) from None
    found: type[CommunicationBackend] = getattr(importlib.import_module(module), attribute)
    return found
