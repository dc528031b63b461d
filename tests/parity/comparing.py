"""Comparison of the ranks' final states."""

from __future__ import annotations

import torch

from tests.parity.training import State


def check_close(expected: State, found: State, tolerance: float) -> None:
    """Fails if a parameter differs from that of one process by more than the tolerance. Buffers are
    ignored."""
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
