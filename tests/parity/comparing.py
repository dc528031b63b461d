"""Comparison of the ranks' final states."""

from __future__ import annotations

import torch

from tests.parity.training import State


def check_close(expected: State, found: State, tolerance: float) -> None:
    """Fails where a parameter is not what one process has, within the bound; buffers are not looked
    at."""
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
