"""Packages that are imported while tests are collected, which each process of pytest does."""

from __future__ import annotations

import sys
from typing import Final

import pytest

LARGE: Final = frozenset(
    {
        "accelerate",
        "datasets",
        "kubernetes_validate",
        "lightning",
        "matplotlib",
        "mlflow",
        "moto",
        "pandas",
        "peft",
        "ray",
        "sklearn",
        "tensorboard",
        "transformers",
        "trl",
        "wandb",
    }
)
"""Packages whose import takes a second or more."""
IMPORTED: Final = pytest.StashKey[frozenset[str]]()
"""Packages of `LARGE` that had been imported when the tests had been collected."""


def large_packages() -> frozenset[str]:
    """Returns the packages of `LARGE` that have been imported."""
    return LARGE & sys.modules.keys()
