"""Rounds of local_sgd: the options, the state of a round, and averages across ranks.

Outer momentum uses the average change of the parameters in a round in place of a gradient. (Wang et
al., "SlowMo", ICLR 2020; Douillard et al., "DiLoCo", 2023.) Everything runs on the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.loader_interface import StepSource
from shoal_worker.state.digest import bytes_of

if TYPE_CHECKING:
    from shoal_worker.config import ShardingConfiguration

Add = Callable[[torch.Tensor], object]
"""Function that sums a flat tensor across all ranks, in place."""
Exchange = Callable[[bytes], list[bytes]]
"""Function that sends bytes to all ranks and returns every rank's bytes, in rank order."""

_CHUNK_ELEMENTS = 2 << 20


# ---------------------------------------------------------------------- weighted means across ranks


def adding(channel: Channel) -> Add:
    """Returns a function that sums a tensor across the ranks of `channel`, in place and in rank
    order. Each rank sends its complete tensor to all others. Meant for operations, which are rare
    and may include fewer ranks than the group."""

    def add(tensor: torch.Tensor) -> None:
        if isinstance(channel, LocalChannel):
            return
        for chunk in tensor.split(_CHUNK_ELEMENTS):
            received = channel.exchange(bytes(bytes_of(chunk)))
            parts = [torch.frombuffer(bytearray(part), dtype=tensor.dtype) for part in received]
            chunk.copy_(torch.stack(parts).sum(0))

    return add


@torch.no_grad()
def weighted_mean(tensors: Sequence[torch.Tensor], share: float, add: Add) -> list[torch.Tensor]:
    """Returns the mean of `tensors` across ranks, weighted by each rank's `share`. The shares of
    all ranks must add up to 1. Uses one sum per dtype.

    Means of integers are rounded.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    means: dict[int, torch.Tensor] = {}
    for dtype, indices in by_dtype.items():
        exact = dtype.is_floating_point or dtype.is_complex
        flat = torch.cat(
            [tensors[i].detach().reshape(-1).to(dtype if exact else torch.float64) for i in indices]
        )
        # because zero times infinity is not zero
        flat = flat.mul_(share) if share else torch.zeros_like(flat)
        add(torch.view_as_real(flat).view(-1) if dtype.is_complex else flat)
        parts = (flat if exact else flat.round().to(dtype)).split(
            [tensors[i].numel() for i in indices]
        )
        means.update(
            (i, part.view(tensors[i].shape)) for i, part in zip(indices, parts, strict=True)
        )
    return [means[i] for i in range(len(tensors))]


def agreed_counts(
    before: Mapping[str, torch.Tensor],
    now: Mapping[str, torch.Tensor],
    *,
    of_round: int,
    steps: int,
    samples: int,
    weight: float,
    exchange: Exchange,
) -> dict[str, torch.Tensor]:
    """Returns the values that counters have on all ranks after a round.

    Usually, the changes that all ranks made to a counter in the round are added to the value that
    it had before. A counter of steps is different: every step of every rank changes it by the same
    amount, so each step of the round is counted once. A counter whose change equals, on every rank,
    the number of samples or their weight is not treated as a counter of steps.

    Args:
        before, now: int64 counters by name, at the round's beginning and end.
        of_round: number of steps in the round.
        steps: number of steps of the round in which this rank had samples.
        samples, weight: number and total weight of these samples.
        exchange: exchanges messages with the other ranks.
    """
    moved = [(now[name] - value).reshape(-1).cpu() for name, value in before.items()]
    own = torch.cat([torch.tensor([steps, samples, round(weight)]), *moved])
    rows = torch.stack(
        [
            torch.frombuffer(bytearray(each), dtype=torch.int64)
            for each in exchange(bytes(bytes_of(own)))
        ]
    )
    rows = rows[rows[:, 0] > 0]
    if not len(rows):
        return dict(before)
    taken, sampled = rows[:, :1], rows[:, 1:3].unsqueeze(2)
    counts: dict[str, torch.Tensor] = {}
    for (name, value), part in zip(
        before.items(), rows[:, 3:].split([each.numel() for each in moved], dim=1), strict=True
    ):
        alike = bool((part * taken[0] == part[0] * taken).all())
        # [ranks, samples or their weight, elements]
        together = part.sum(1)[:, None, None]
        of_samples = (part.unsqueeze(1) == sampled) | ((together == sampled) & (part.shape[1] > 1))
        several = (sampled > taken.unsqueeze(2)).any(0)
        is_steps = alike and not bool((of_samples.all(0) & several).any())
        total = part[0] * of_round // taken[0] if is_steps else part.sum(0)
        counts[name] = value + total.view(value.shape).to(value.device)
    return counts


def mean_optimizer_state(
    state: dict[int, dict[str, Any]], exchange: Exchange, add: Add, device: torch.device
) -> dict[int, dict[str, Any]]:
    """Returns the mean of the ranks' optimizer states, by parameter index as in
    `state_dict()["state"]`.

    Each entry is the mean over the ranks that have a state of that parameter. Values other than
    tensors are taken from the first of these ranks.
    """
    described = [json.loads(reply) for reply in exchange(json.dumps(_describe(state)).encode())]
    merged: dict[str, dict[str, Any]] = {}
    for entries in described:
        for number, entry in entries.items():
            merged.setdefault(number, entry)
    if not merged:
        return {}
    holders = torch.tensor(
        [sum(number in entries for entries in described) for number in merged], dtype=torch.float64
    )
    mean: dict[int, dict[str, Any]] = {
        int(number): {key: kind.get("value") for key, kind in entry.items()}
        for number, entry in merged.items()
    }

    def add_on_device(flat: torch.Tensor) -> None:
        sent = flat.to(device)
        add(sent)
        flat.copy_(sent)

    # Values that optimizers keep on the host, such as step counts, are packed into one tensor for
    # the transfer to the device and back.
    for on_host, sum_up in ((False, add), (True, add_on_device)):
        places: list[tuple[int, str, float]] = []
        parts: list[torch.Tensor] = []
        for (number, entry), count in zip(merged.items(), holders.tolist(), strict=True):
            for key, kind in entry.items():
                if kind.get("on_host") is on_host:
                    where = torch.device("cpu") if on_host else device
                    own = state[int(number)][key] if int(number) in state else None
                    empty = {"dtype": getattr(torch, kind["dtype"]), "device": where}
                    parts.append(
                        own.to(where) if own is not None else torch.zeros(kind["shape"], **empty)
                    )
                    places.append((int(number), key, count))
        for (place, key, count), total in zip(
            places, weighted_mean(parts, 1.0, sum_up), strict=True
        ):
            exact = total.is_floating_point() or total.is_complex()
            mean[place][key] = (
                total / count if exact else (total.double() / count).round().to(total.dtype)
            )
    return mean


def _describe(state: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        str(number): {
            key: {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "on_host": value.device.type == "cpu",
            }
            if isinstance(value, torch.Tensor)
            else {"value": value}
            for key, value in entry.items()
        }
        for number, entry in state.items()
    }


# ------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Options of local_sgd.

    Raises:
        ConfigurationError: invalid values.
    """

    sync_every: int = 8
    """Number of steps in a round; >= 1."""
    average_optimizer_state: bool = False
    """True to average the optimizer state too."""
    outer_learning_rate: float = 1.0
    """Learning rate of the outer update, > 0: how far parameters move from their values at the
    round's start towards the round's average. 1: exactly to the average."""
    outer_momentum: float = 0.0
    """Momentum of the outer update, from 0 (none) to less than 1."""
    outer_nesterov: bool = False
    """True if the outer update uses Nesterov momentum."""

    def __post_init__(self) -> None:
        if type(self.sync_every) is not int or self.sync_every < 1:
            raise ConfigurationError(
                f"sync_every={self.sync_every!r}: expected a whole number of steps, at least 1"
            )
        if not self.outer_learning_rate > 0:
            raise ConfigurationError(
                f"outer_learning_rate={self.outer_learning_rate}: expected more than 0; 1.0 uses "
                "the average unchanged"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"outer_momentum={self.outer_momentum}: expected at least 0 and less than 1"
            )
        if self.outer_nesterov and self.outer_momentum == 0:
            raise ConfigurationError(
                "outer_nesterov=True needs momentum; pass outer_momentum=0.9, for example, or "
                "leave outer_nesterov out"
            )


def check_configuration(config: ShardingConfiguration) -> None:
    """Checks the settings for local_sgd, under which no gradients are sent to other ranks.

    Raises:
        ConfigurationError: a setting has no meaning under local_sgd.
    """
    if config.loss_reduction != "mean":
        raise ConfigurationError(
            'loss_reduction="sum": local_sgd averages parameters, not gradients; use a mean '
            'loss with loss_reduction="mean"'
        )
    if config.deterministic:
        raise ConfigurationError(
            "deterministic=True: with local_sgd, the result depends on the number of ranks that "
            "train independently; use ddp, zero1, zero2 or zero3"
        )
    if not config.auto_sync_gradients:
        raise ConfigurationError(
            "auto_sync_gradients=False: local_sgd never synchronizes gradients; leave it out"
        )


class Round:
    """This rank's state in a round (the steps between two averages)."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of committed steps in the round; 0: all ranks have the same parameters."""
        self.weight = 0.0
        """Total weight of this rank's samples in the round's steps."""
        self.samples = 0
        """Number of this rank's samples in the round's steps."""
        self.sampled_steps = 0
        """Number of committed steps with samples on this rank."""
        self.counters: dict[str, torch.Tensor] = {}
        """Copies of the state's counters at the round's beginning, by name."""
        self.trained: dict[str, torch.Tensor] = {}
        """Parameters trained in at least one step of the round, by name."""
        self.ends_early = False
        """True if the round ends with the next committed step."""
        self.averages_state = False
        """True if the end of the round averages the optimizer state too."""
        self.generation = 0
        """Number of the generation at the beginning of the round."""
        self._source: StepSource | None = None

    def step_begins(self, source: StepSource | None, module: nn.Module, generation: int) -> None:
        """Begins a step of `source` in the round. The step trains the parameters of `module` that
        require gradients.

        Raises:
            PreconditionError: the round has steps of a different loader.
        """
        if self.steps == 0:
            self.trained, self._source, self.generation = {}, source, generation
        elif source is not self._source:
            raise PreconditionError(
                f"local_sgd: this step uses loader {source.name if source else ''!r}, but its "
                f"round began with loader {self._source.name if self._source else ''!r}. After a "
                "failure, the whole round is repeated, and the script could not go back to the "
                "other loader; use sync_every=1, or one loader"
            )
        self.trained |= {name: p for name, p in module.named_parameters() if p.requires_grad}

    def ends_with_next_step(self, options: RoundOptions) -> bool:
        """Returns whether the current step is the last of the round: because of the number of
        steps, the end of the epoch, or a request."""
        ends_epoch = self._source is not None and self._source.ends_epoch
        return self.ends_early or self.steps + 1 >= options.sync_every or ends_epoch

    def step_committed(self, weight: float, samples: int) -> None:
        """Records a committed step that does not end the round. `weight`, `samples`: weight and
        number of this rank's samples in the step."""
        self.steps += 1
        self.sampled_steps += weight > 0
        self.weight += weight
        self.samples += samples


class OuterMomentum:
    """Outer update, which moves parameters from their values at a round's start towards, or beyond,
    the round's average. With the default options, it sets the parameters to the average."""

    def __init__(self, options: RoundOptions) -> None:
        self._options = options
        self._wanted = options.outer_momentum > 0 or options.outer_learning_rate != 1.0
        self._before: dict[str, torch.Tensor] = {}
        self.momentum: dict[str, torch.Tensor] = {}
        """Momentum of each parameter, by name. It is the same on all ranks, and part of the
        committed state."""

    @torch.no_grad()
    def round_begins(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copies the parameters' current values at the start of a round."""
        if self._wanted:
            self._before = {name: parameter.clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def move(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Replaces the round's average in the parameters with the values with which the next round
        starts."""
        options = self._options
        for name, parameter in parameters.items() if self._wanted else ():
            before = self._before[name]
            delta = moved = before - parameter
            if options.outer_momentum > 0:
                momentum = self.momentum.setdefault(name, torch.zeros_like(delta))
                momentum.mul_(options.outer_momentum).add_(delta)
                moved = (
                    delta + options.outer_momentum * momentum
                    if options.outer_nesterov
                    else momentum
                )
            parameter.copy_(before - options.outer_learning_rate * moved)
