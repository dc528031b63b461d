"""What transformers makes of the predictions of several batches, as in its own
`evaluation_loop`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.trainer_pt_utils import EvalLoopContainer


def concatenated(parts: Iterable[Any], *, concatenates: bool) -> Any:
    """What transformers makes of logits or labels of several batches: arrays, padded to one width.
    `concatenates`: else lists of them."""
    container = EvalLoopContainer(concatenates, padding_index=-100)
    for part in parts:
        if part is not None:
            container.add(part)
    return container.get_arrays()
