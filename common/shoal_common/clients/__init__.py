"""Typed synchronous clients of Shoal's services: deadlines on every call, ShoalErrors out."""

from shoal_common.clients.coordinator import CoordinatorClient

__all__ = ["CoordinatorClient"]
