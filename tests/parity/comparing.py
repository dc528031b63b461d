"""How what ranks ended with is compared."""

from __future__ import annotations

from typing import Final

import torch

from tests.parity.cells import Cell
from tests.parity.training import State

_TOLERANCES: Final = {"float64": 1e-10, "float32": 1e-5}


def check_close(expected: State, found: State, cell: Cell) -> None:
    """Fails where a parameter is not what one process has, within the cell's bound; buffers are not looked at."""
    tolerance = _TOLERANCES[cell.check]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
