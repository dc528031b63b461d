"""Combines the predictions of several batches as transformers' own `evaluation_loop` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.trainer_pt_utils import EvalLoopContainer


def concatenated(parts: Iterable[Any], *, concatenates: bool) -> Any:
    """Combines logits or labels of several batches into arrays that are padded to the same width.
    With `concatenates` False, returns lists instead."""
    container = EvalLoopContainer(concatenates, padding_index=-100)
    for part in parts:
        if part is not None:
            container.add(part)
    return container.get_arrays()
