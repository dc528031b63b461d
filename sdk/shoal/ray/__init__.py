"""Shoal on Ray: `shoal.ray.run` (docs/clusters/ray.md). Ray itself is imported when that is
called."""

from shoal.ray.api import run

__all__ = ["run"]
