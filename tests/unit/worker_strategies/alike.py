"""Comparison of states that may differ by rounding errors."""

from __future__ import annotations

import torch


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=1e-10,
            atol=1e-10,
            msg=lambda message, name=name: f"{name}: {message}",
        )
