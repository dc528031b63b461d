"""Communication backends: collectives over process groups that can be ended and made anew.

Importing this package makes torch know the backend "shoal_gloo" (torch_backend.py).
"""

from shoal_worker.backends import torch_backend as torch_backend
from shoal_worker.backends.base import CommunicationBackend, ReduceOp
from shoal_worker.backends.errors import GroupEndedError
from shoal_worker.backends.handle import Handle
from shoal_worker.backends.registry import backend_class, backend_names

__all__ = ["CommunicationBackend", "GroupEndedError", "Handle", "ReduceOp", "backend_class", "backend_names"]
