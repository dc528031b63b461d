"""Shoal on Ray: `shoal.ray.run` (docs/clusters/ray.md). Ray is imported when `run` is called."""

from shoal.ray.api import run

__all__ = ["run"]
