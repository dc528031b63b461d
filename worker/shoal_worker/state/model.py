"""Whether a saved model state is of the model that is to take it: asked as a whole before anything is changed.

torch's `load_state_dict` copies what fits, and only then complains.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from shoal_common.errors import CorruptDataError
from torch import nn


def check_tensors_fit(tensors: Mapping[str, torch.Tensor], module: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Checks what `full_state_dict` of any strategy gave. `shapes`: of the tensors of `module`'s state when they are whole.

    Raises:
        CorruptDataError (MODEL_DIFFERS): names or shapes are others.
    """
    differing = sorted(set(tensors) ^ set(shapes)) or [name for name, shape in shapes.items() if tensors[name].shape != shape]
    if differing:
        raise CorruptDataError(
            f"the state is of another model than this {type(module).__name__}: names or shapes differ, {differing[:3]} among them",
            reason="MODEL_DIFFERS",
        )
