"""Communication backends: collectives over process groups that can be ended and made anew."""

from shoal_worker.backends.base import CommunicationBackend, ReduceOp
from shoal_worker.backends.errors import GroupEndedError
from shoal_worker.backends.handle import Handle
from shoal_worker.backends.registry import backend_class, backend_names

__all__ = ["CommunicationBackend", "GroupEndedError", "Handle", "ReduceOp", "backend_class", "backend_names"]
