"""Typed synchronous clients of Shoal's services. Every call has a deadline, and errors are
ShoalErrors."""

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.clients.parameter_server import ParameterServerClient

__all__ = ["CoordinatorClient", "ParameterServerClient"]
