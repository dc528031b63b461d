"""What is hidden of a module's parameters between passes, where this rank has its part of them alone.

Of a parameter that is split or on another stage the values (no call of torch's on this part alone means the whole), of the others the
gradients, which are not the replicas' sum yet. In passes all of it is there. See `engine/hidden_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from shoal_worker.engine.hidden_parameters import (
    HiddenParameter,
    Whereabouts,
    drop_gradient,
    gradient_of,
    hide,
    hide_gradient,
    show,
    show_gradient,
)


class HiddenParameters:
    """Those of one module, as it is laid out now."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], whereabouts: Whereabouts) -> None:
        """`parameters`: all of the module's, those on the meta device among them, which are another rank's."""
        self._whereabouts = whereabouts
        self._all = [(parameter, HiddenParameter(name, whereabouts)) for name, parameter in parameters.items()]
        self._absent = [each for each in self._all if each[0].is_meta]
        self._split = [each for each in self._all if isinstance(each[0], DTensor) and not each[0].is_meta]
        self._trained = [each for each in self._all if each[0].requires_grad]
        self._handed_out = False
        """The gradients that parameters have are those to update with."""

    def hide(self) -> None:
        """No pass is going on."""
        if not self._handed_out:
            if any(gradient_of(parameter) is not None for parameter, _ in self._trained):
                self._whereabouts.pending = True
            for _, place in self._trained if self._whereabouts.pending else ():
                place.gradient = True
        for parameter, place in (*self._absent, *self._split):
            hide(parameter, place)
        for parameter, place in self._trained:
            if place.gradient:
                hide_gradient(parameter, place)

    def handed_out(self) -> None:
        """The step's gradients are summed, and those that parameters have are what this rank updates with: nobody is to set others."""
        self._handed_out = True
        for parameter, place in self._trained:
            place.gradient = place.gradient and gradient_of(parameter) is None
            hide_gradient(parameter, place)

    def show(self) -> None:
        """A pass begins."""
        for parameter, place in self._split:
            show(parameter, place)
        self.show_gradients()

    def show_gradients(self) -> None:
        """What has values here gets its own gradients, too."""
        for parameter, place in self._trained:
            show_gradient(parameter, place)

    def drop_gradients(self) -> None:
        """The parameters have no gradients, here or elsewhere."""
        self._handed_out = self._whereabouts.pending = False
        for parameter, place in self._trained:
            drop_gradient(parameter, place)

    def release(self) -> None:
        """The parameters are another's from here on."""
        for parameter, place in self._all:
            show(parameter, place)
