"""A partition's optimizer: one `torch.optim` instance over the runs of its values.

A run is one tensor for pieces that lie side by side, have the same hyperparameters and have been through the same updates: torch steps them
at once. A push that has a gradient for a part of a run splits it, since from then on the parts differ (in Adam's count of steps, say).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from shoal_common.server_optimizers import SERVER_OPTIMIZERS

from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class RunImage:
    """A run's state at one moment, in tensors of its own."""

    first: int
    """Position of its first piece; it ends before piece `end`."""
    end: int
    state: Mapping[str, torch.Tensor]
    """By the optimizer's names; empty before its first update."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    first: int
    end: int
    values: torch.Tensor
    """A view of the partition's."""


class PartitionOptimizer:
    """Changes a partition's values in place. Belongs to the thread that owns the partition."""

    def __init__(self, values: torch.Tensor, spec: PartitionSpec, settings: OptimizerSettings, runs: Sequence[RunImage] = ()) -> None:
        """`runs`: as they were; none: before the first update. Their tensors become the optimizer's own."""
        self._values = values
        self._spec = spec
        bounds = [(run.first, run.end) for run in runs] or list(_alike(spec, settings))
        self._runs = [_Run(first=first, end=end, values=self._view(first, end)) for first, end in bounds]
        by_place: dict[int, list[torch.Tensor]] = {}
        for run in self._runs:
            by_place.setdefault(settings.place_of(spec.pieces[run.first].tensor), []).append(run.values)
        self._places = list(by_place)
        """Where the hyperparameters of each torch parameter group are in the settings."""
        declared = SERVER_OPTIMIZERS[settings.name]
        made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, declared.torch_class)
        least = declared.fused_from_bytes
        fused = {} if least is None else {"fused": values.element_size() >= least}
        groups = [{"params": params, **declared.arguments(settings.at(place))} for place, params in by_place.items()]
        self._torch = made(groups, **fused)
        for run, image in zip(self._runs, runs, strict=False):
            if image.state:
                self._torch.state[run.values] = dict(image.state)

    def retune(self, settings: OptimizerSettings) -> None:
        """Takes other hyperparameters; the state stays."""
        declared = SERVER_OPTIMIZERS[settings.name]
        for place, group in zip(self._places, self._torch.param_groups, strict=True):
            group.update(declared.arguments(settings.at(place)))

    def step(self, gradient: torch.Tensor, absent: Collection[int] = ()) -> None:
        """One update. `gradient`: of all pieces but those at the positions `absent`, one after another; it is read and not kept."""
        if absent:
            self._split(frozenset(absent))
        present = [run for run in self._runs if run.first not in absent]
        gradients = dict(zip(present, gradient.split([run.values.numel() for run in present]), strict=True))
        fresh = [run for run in present if run.values not in self._torch.state]
        try:
            # Apart: torch's fused SGD fails where some have their momentum and some have not.
            for together in (fresh, [run for run in present if run not in fresh]):
                self._step({run: gradients[run] for run in together})
        except BaseException:
            for run in fresh:  # half of a state would be taken for a whole one
                self._torch.state.pop(run.values, None)
            raise

    def _step(self, gradients: Mapping[_Run, torch.Tensor]) -> None:
        if not gradients:
            return
        try:
            for run, gradient in gradients.items():
                run.values.grad = gradient
            self._torch.step()
        finally:
            for run in gradients:
                run.values.grad = None

    def fresh_bytes(self, absent: Collection[int]) -> int:
        """Bytes of the values that have no state yet, and would get some from an update without the pieces `absent`."""
        missing = frozenset(absent)
        fresh = (run for run in self._runs if run.values not in self._torch.state)
        pieces = (
            piece
            for run in fresh
            for position, piece in enumerate(self._spec.pieces[run.first : run.end], run.first)
            if position not in missing
        )
        return sum(piece.length for piece in pieces) * self._spec.element.itemsize

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the state, with the name of its kind."""
        for run in self._runs:
            yield from self._state_of(run).items()

    def images(self) -> tuple[RunImage, ...]:
        """Copies."""
        return tuple(
            RunImage(first=run.first, end=run.end, state={name: tensor.clone() for name, tensor in self._state_of(run).items()})
            for run in self._runs
        )

    def _state_of(self, run: _Run) -> dict[str, torch.Tensor]:
        if run.values not in self._torch.state:  # asking would make an empty one
            return {}
        return {name: tensor for name, tensor in self._torch.state[run.values].items() if isinstance(tensor, torch.Tensor)}

    def _view(self, first: int, end: int) -> torch.Tensor:
        starts = self._spec.starts
        return self._values[starts[first] : starts[end]]

    def _split(self, absent: frozenset[int]) -> None:
        """No run has pieces of both kinds any more."""
        runs: list[_Run] = []
        for run in self._runs:
            parts = [list(positions) for _, positions in groupby(range(run.first, run.end), key=absent.__contains__)]
            if len(parts) == 1:
                runs.append(run)
                continue
            made = [_Run(first=part[0], end=part[-1] + 1, values=self._view(part[0], part[-1] + 1)) for part in parts]
            self._replace(run, made)
            runs += made
        self._runs = runs

    def _replace(self, run: _Run, parts: Sequence[_Run]) -> None:
        for group in self._torch.param_groups:
            for index, params in enumerate(group["params"]):
                if params is run.values:
                    group["params"][index : index + 1] = [part.values for part in parts]
                    break
        if run.values not in self._torch.state:
            return
        state = self._torch.state.pop(run.values)
        length = run.values.numel()
        begin = 0
        for part in parts:
            end = begin + part.values.numel()
            self._torch.state[part.values] = {
                name: value if not isinstance(value, torch.Tensor) else value[begin:end] if value.shape == (length,) else value.clone()
                for name, value in state.items()
            }
            begin = end


def _alike(spec: PartitionSpec, settings: OptimizerSettings) -> Iterator[tuple[int, int]]:
    """First and end of each stretch of pieces with the same hyperparameters."""
    for _, positions in groupby(range(len(spec.pieces)), key=lambda position: settings.place_of(spec.pieces[position].tensor)):
        stretch = list(positions)
        yield stretch[0], stretch[-1] + 1


def warm_up() -> None:
    """Call once at the start: torch imports its compiler, for a second, when a process makes its first optimizer. No push should wait for
    that."""
    torch.optim.SGD([torch.zeros(1)], lr=0.0)
