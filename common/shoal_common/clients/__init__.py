"""Synchronous clients of Shoal's services with typed methods. Every call has a deadline, and all
errors are ShoalErrors."""

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.clients.parameter_server import ParameterServerClient

__all__ = ["CoordinatorClient", "ParameterServerClient"]
