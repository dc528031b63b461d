"""Optimizer of a partition: one `torch.optim` instance whose parameters are the runs of the
partition.

A run is one tensor for adjacent pieces that have the same hyperparameters and have received the
same updates, so that torch updates them together. If a push has gradients for only part of a run,
the run is split, because its parts then differ (e.g. in Adam's step count). If there is optimizer
state, the split is permanent. For an optimizer that combines several elements, each piece is a
separate run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from shoal_common.optimizers.for_servers import SERVER_OPTIMIZERS, Unit

from shoal_ps_server.shard.layout import PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class RunImage:
    """State of one run at one moment."""

    first: int
    """Position of the run's first piece; `end`: position after its last piece."""
    end: int
    state: Mapping[str, torch.Tensor]
    """State tensors of the optimizer, by torch's names; empty before the run's first update."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    first: int
    end: int
    values: torch.Tensor
    """The run's part of the partition's values: a view, used as torch's parameter. It is flat, or
    has rows if the optimizer works on rows."""


class PartitionOptimizer:
    """Updates a partition's values in place. Belongs to the thread that owns the partition."""

    def __init__(
        self,
        values: torch.Tensor,
        spec: PartitionSpec,
        settings: OptimizerSettings,
        runs: Sequence[RunImage] = (),
    ) -> None:
        """`runs`: runs of an earlier optimizer of the partition, whose tensors this optimizer takes
        over; empty before the first update."""
        self._values = values
        self._spec = spec
        self._place_of_piece = [settings.place_of(piece.tensor) for piece in spec.pieces]
        self._unit = settings.unit
        alike = self._place_of_piece if self._unit is Unit.ELEMENT else range(len(spec.pieces))
        bounds = [(run.first, run.end) for run in runs] or list(_alike(alike))
        self._runs = [self._run(first, end) for first, end in bounds]
        by_place: dict[int, list[torch.Tensor]] = {}
        for run in self._runs:
            by_place.setdefault(self._place_of(run), []).append(run.values)
        self._places = list(by_place)
        """Indices of hyperparameters in the settings, one for each of torch's parameter groups."""
        declared = SERVER_OPTIMIZERS[settings.name]
        made: Callable[..., torch.optim.Optimizer] = declared.optimizer_class()
        least = declared.fused_from_bytes
        fused = {} if least is None else {"fused": values.element_size() >= least}
        groups = [
            {"params": params, **declared.arguments(settings.at(place))}
            for place, params in by_place.items()
        ]
        # Adagrad takes the initial state from its constructor's arguments, not from the groups.
        self._torch = made(groups, **fused, **declared.arguments(settings.hyperparameters))
        for run, image in zip(self._runs, runs, strict=False):
            if image.state:
                self._torch.state[run.values] = dict(image.state)

    def retune(self, settings: OptimizerSettings) -> None:
        """Switches to the hyperparameters in `settings`. The optimizer state is kept."""
        declared = SERVER_OPTIMIZERS[settings.name]
        for place, group in zip(self._places, self._torch.param_groups, strict=True):
            group.update(declared.arguments(settings.at(place)))

    def step(self, gradient: torch.Tensor, absent: Collection[int] = ()) -> None:
        """Performs one update. `gradient`: gradients of all pieces except those at the positions
        `absent`, one after another; it is not kept."""
        missing = frozenset(absent)
        if missing:
            self._split(missing)
        present = [run for run in self._runs if run.first not in missing]
        gradients = gradient.split([run.values.numel() for run in present])
        fresh: dict[_Run, torch.Tensor] = {}
        known: dict[_Run, torch.Tensor] = {}
        for run, part in zip(present, gradients, strict=True):
            (known if run.values in self._torch.state else fresh)[run] = part
        try:
            # Updates these separately, since torch's fused SGD fails if only some parameters have
            # momentum.
            self._step(fresh)
            self._step(known)
        except BaseException:
            for run in fresh:  # an incomplete state would be mistaken for a complete one
                self._torch.state.pop(run.values, None)
            raise
        if missing:
            self._join_stateless()

    def _step(self, gradients: Mapping[_Run, torch.Tensor]) -> None:
        if not gradients:
            return
        try:
            for run, gradient in gradients.items():
                run.values.grad = gradient.view(run.values.shape)
            self._torch.step()
        finally:
            for run in gradients:
                run.values.grad = None

    def fresh_pieces(self, absent: Collection[int]) -> list[Piece]:
        """Returns the pieces that would get new optimizer state in an update that has no gradients
        for the pieces at the positions `absent`."""
        missing = frozenset(absent)
        fresh = (run for run in self._runs if run.values not in self._torch.state)
        return [
            self._spec.pieces[position]
            for run in fresh
            for position in range(run.first, run.end)
            if position not in missing
        ]

    def state(self) -> Iterator[tuple[str, int, int, torch.Tensor]]:
        """Yields each state tensor as a tuple: its name, the index of the first element of the
        values that it belongs to, the number of values per state element, and the tensor."""
        for run in self._runs:
            each = self._spec.pieces[run.first].row if self._unit is Unit.ROW else 1
            for name, tensor in self._state_of(run).items():
                yield name, self._spec.starts[run.first], each, tensor

    def images(self) -> tuple[RunImage, ...]:
        """Returns an image of each run of pieces, in the order of the pieces. The images share the
        optimizer's state tensors, which change in the next step."""
        return tuple(
            RunImage(first=run.first, end=run.end, state=self._state_of(run)) for run in self._runs
        )

    def _state_of(self, run: _Run) -> dict[str, torch.Tensor]:
        if (
            run.values not in self._torch.state
        ):  # avoids indexing, which would create an empty state
            return {}
        return {
            name: tensor
            for name, tensor in self._torch.state[run.values].items()
            if isinstance(tensor, torch.Tensor)
        }

    def _run(self, first: int, end: int) -> _Run:
        starts = self._spec.starts
        values = self._values[starts[first] : starts[end]]
        if self._unit is Unit.ROW:
            values = values.view(-1, self._spec.pieces[first].row)
        return _Run(first=first, end=end, values=values)

    def _split(self, missing: frozenset[int]) -> None:
        """Splits runs so that each run contains either only missing pieces or no missing pieces."""
        parts_of: dict[_Run, list[_Run]] = {}
        for run in self._runs:
            parts = [
                list(positions)
                for _, positions in groupby(range(run.first, run.end), key=missing.__contains__)
            ]
            if len(parts) > 1:
                parts_of[run] = [self._run(part[0], part[-1] + 1) for part in parts]
        for run, made in parts_of.items():
            self._hand_down(run, made)
        self._put([part for run in self._runs for part in parts_of.get(run, (run,))])

    def _join_stateless(self) -> None:
        """Merges adjacent runs without state that have the same hyperparameters."""
        if self._unit is not Unit.ELEMENT:
            return
        runs: list[_Run] = []
        for run in self._runs:
            before = runs[-1] if runs else None
            stateless = (
                before is not None and not self._state_of(run) and not self._state_of(before)
            )
            if before is not None and stateless and self._place_of(before) == self._place_of(run):
                for each in (before, run):
                    self._torch.state.pop(each.values, None)
                runs[-1] = self._run(before.first, run.end)
            else:
                runs.append(run)
        if len(runs) < len(self._runs):
            self._put(runs)

    def _put(self, runs: list[_Run]) -> None:
        """Replaces the partition's runs and torch's parameters."""
        self._runs = runs
        by_place: dict[int, list[torch.Tensor]] = {place: [] for place in self._places}
        for run in runs:
            by_place[self._place_of(run)].append(run.values)
        for group, values in zip(self._torch.param_groups, by_place.values(), strict=True):
            group["params"] = values

    def _place_of(self, run: _Run) -> int:
        return self._place_of_piece[run.first]

    def _hand_down(self, run: _Run, parts: Sequence[_Run]) -> None:
        """Distributes a run's state to the parts that it was split into."""
        if run.values not in self._torch.state:
            return
        state = self._torch.state.pop(run.values)
        length = run.values.numel()
        begin = 0
        for part in parts:
            end = begin + part.values.numel()
            self._torch.state[part.values] = {
                name: value
                if not isinstance(value, torch.Tensor)
                else value[begin:end]
                if value.shape == (length,)
                else value.clone()
                for name, value in state.items()
            }
            begin = end


def _alike(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each maximal sequence of pieces with the same hyperparameters."""
    for _, positions in groupby(range(len(places)), key=places.__getitem__):
        stretch = list(positions)
        yield stretch[0], stretch[-1] + 1


def warm_up() -> None:
    """Creates a first optimizer, so that torch imports its compiler at startup. Otherwise the first
    push would have to wait a second for the import."""
    torch.optim.SGD([torch.zeros(1)], lr=0.0)
