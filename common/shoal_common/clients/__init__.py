"""Typed synchronous clients of Shoal's services: deadlines on every call, ShoalErrors out."""

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.clients.parameter_server import ParameterServerClient

__all__ = ["CoordinatorClient", "ParameterServerClient"]
