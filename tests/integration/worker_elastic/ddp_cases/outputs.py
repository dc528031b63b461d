"""Cases of models with different outputs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.integration.worker_elastic.ddp_cases.case import (
    Place,
    State,
    case,
    cases,
    network,
    train,
)


@case
def an_output_changed_in_place(place: Place) -> State:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        logits[:, 0] += 1
        return nn.functional.mse_loss(logits, y)

    return train(place, network(), loss)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class ModelOutput(collections.OrderedDict):
    # like Hugging Face's outputs, which torch's pytree does not know either until they are
    # registered
    pass


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, list[torch.Tensor]]


class Opaque:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net = network()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.net(x))


@cases(
    dataclass=(lambda t: Output(logits=t), lambda o: o.logits),
    model_output=(lambda t: ModelOutput(logits=t), lambda o: o["logits"]),
    nested=(lambda t: Pair(t * 0, {"all": [t, t]}), lambda o: o.second["all"][1]),
    opaque=(Opaque, lambda o: o.hidden),
)
def an_output_in_a_structure(place: Place, variant: Any) -> State:
    make, get = variant
    return train(
        place, Returning(make), lambda model, x, y: nn.functional.mse_loss(get(model(x)), y)
    )
