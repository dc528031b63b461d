"""What `as_distributed(..., strategy="async_sgd", ...)` takes beside the settings common to all
strategies, and what the servers are told of the user's optimizer. Values only."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from shoal_common import codecs
from shoal_common.codecs import POWERSGD_LARGEST_RANK
from shoal_common.errors import ConfigurationError
from shoal_common.server_optimizers import SERVER_OPTIMIZERS, Unit, in_words
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.backends.registry import backend_names
from shoal_worker.compression.powersgd import PowerSGDCompressor
from shoal_worker.compression.registry import compressor_class, compressor_names
from shoal_worker.config import ShardingConfiguration

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """Options of async_sgd.

    Raises:
        ConfigurationError: a value that cannot work, or two that contradict each other.
    """

    consistency: str = "asp"
    """"asp": nobody waits. "ssp": a worker more than `staleness_bound` iterations ahead of the
    slowest one waits at the end of its step. "bsp": all workers that take part in an iteration
    compute it on the same values, those after all pushes of the one before."""
    staleness_bound: int | None = None
    """ssp only, and needed there: iterations, >= 0."""
    pull_every: int = 1
    """Pull new values in every n-th step only; >= 1. Saves half of the bytes at most, for gradients
    of older values."""
    prefetch: bool = False
    """Pull values while the next batch is computed, instead of waiting for them: steps are shorter
    by a pull, and gradients are of values that are older by at most one pull. With "asp" only."""
    server_timeout: timedelta = timedelta(minutes=5)
    """Longest a parameter server may be away (it restarts, say) before `optimizer.step()` gives
    up."""

    lease_ahead: timedelta = timedelta(seconds=20)
    """How much work a worker leases ahead, by its pace so far: about so long it trains on while the
    coordinator is away. What a worker that dies had leased is dealt again. 0: each batch by
    itself."""

    delay_compensation: float = 0.0
    """How much of a gradient's staleness the servers make good for (DC-ASGD; Zheng et al., ICML
    2017), >= 0; 0: nothing; 0.04 is a value to begin with. Costs a server up to a copy of its share
    for each worker."""

    pull_compression: str | None = None
    """What values are rounded to on their way from the servers: "bf16", "fp16" or "int8"; None:
    they come as they are. The servers keep full precision; gradients are computed on the rounded
    values. The first values, frozen parameters and `full_state_dict` are never rounded."""

    inner_steps: int | None = None
    """Take so many steps with the optimizer here, on the worker, and push what they have moved as
    one gradient to `outer_optimizer`, which the servers run; >= 1 (DiLoCo; Douillard et al., 2023,
    algorithm 1). The same on all workers. None: each step is a push, and the servers run the
    optimizer."""
    outer_optimizer: torch.optim.Optimizer | None = None
    """With `inner_steps`, and needed there: one that servers have, made from the same parameters.
    For K workers `shoal.optim.DelayedNesterov(net.parameters(), every=K)` has the paper's learning
    rate and momentum."""

    def __post_init__(self) -> None:
        if self.pull_compression is not None:
            check_pull_compression(self.pull_compression)
        if self.consistency not in ("asp", "ssp", "bsp"):
            raise ConfigurationError(
                f'consistency={self.consistency!r}: expected "asp", "ssp" or "bsp"'
            )
        if self.consistency == "ssp" and self.staleness_bound is None:
            raise ConfigurationError(
                'consistency="ssp" needs staleness_bound=: how many iterations a worker may be '
                "ahead of the slowest; 3, say"
            )
        if self.consistency != "ssp" and self.staleness_bound is not None:
            why = "where nobody waits" if self.consistency == "asp" else "where all wait for all"
            raise ConfigurationError(
                f'staleness_bound={self.staleness_bound} with consistency="{self.consistency}", '
                f'{why}; give consistency="ssp", or no bound'
            )
        if self.staleness_bound is not None and (
            type(self.staleness_bound) is not int or not 0 <= self.staleness_bound < 2**31
        ):
            raise ConfigurationError(
                f"staleness_bound={self.staleness_bound!r}: expected a whole number of iterations, "
                "0 or more"
            )
        if type(self.pull_every) is not int or self.pull_every < 1:
            raise ConfigurationError(
                f"pull_every={self.pull_every!r}: expected a whole number of steps, at least 1"
            )
        if self.waits_for_others and self.pull_every > 1:
            raise ConfigurationError(
                f'pull_every={self.pull_every} with consistency="{self.consistency}", which is '
                "kept by waiting at pulls; "
                'use pull_every=1, or "asp"'
            )
        if self.prefetch and (
            self.waits_for_others or self.delay_compensation or self.inner_steps is not None
        ):
            other = (
                f'consistency="{self.consistency}", which is kept by waiting at pulls'
                if self.waits_for_others
                else f"inner_steps={self.inner_steps}: the next inner steps go on from what is "
                "pulled"
                if self.inner_steps is not None
                else f"delay_compensation={self.delay_compensation}: servers take the values that "
                "they sent last for those of a gradient"
            )
            raise ConfigurationError(f"prefetch=True with {other}; leave prefetch out")
        if not isinstance(self.server_timeout, timedelta) or self.server_timeout <= timedelta(0):
            raise ConfigurationError(
                f"server_timeout={self.server_timeout!r}: expected a positive timedelta"
            )
        if not isinstance(self.lease_ahead, timedelta) or self.lease_ahead < timedelta(0):
            raise ConfigurationError(
                f"lease_ahead={self.lease_ahead!r}: expected a timedelta, 0 or above"
            )
        strength = self.delay_compensation
        if (
            isinstance(strength, bool)
            or not isinstance(strength, int | float)
            or not (math.isfinite(strength) and strength >= 0)
        ):
            raise ConfigurationError(
                f"delay_compensation={strength!r}: expected a finite number, 0 or above; 0.04, say"
            )
        self._check_rounds()

    def _check_rounds(self) -> None:
        outer, steps = self.outer_optimizer, self.inner_steps
        if steps is None:
            if outer is not None:
                raise ConfigurationError(
                    f"outer_optimizer={type(outer).__name__} without inner_steps=: how many steps "
                    "a worker takes before each push; 32, say"
                )
            return
        if type(steps) is not int or steps < 1:
            raise ConfigurationError(
                f"inner_steps={steps!r}: expected a whole number of steps, at least 1"
            )
        if not isinstance(outer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"outer_optimizer={outer!r} with inner_steps={steps}: expected the optimizer that "
                "the servers are to run, made from the model's parameters: for 4 workers "
                "shoal.optim.DelayedNesterov(net.parameters(), every=4), say"
            )
        if self.pull_every > 1:
            raise ConfigurationError(
                f"pull_every={self.pull_every} with inner_steps={steps}: each push ends with a "
                "pull, from which the next inner steps go on. Leave it out, or raise inner_steps"
            )
        if self.delay_compensation:
            raise ConfigurationError(
                f"delay_compensation={self.delay_compensation} with inner_steps={steps}: it is for "
                "the gradient of one batch, whose square stands for a curvature; what inner steps "
                "have moved is none. Leave it out"
            )

    @property
    def waits_for_others(self) -> bool:
        """ssp and bsp."""
        return self.consistency != "asp"

    @property
    def in_step(self) -> bool:
        """bsp."""
        return self.consistency == "bsp"

    def message(self) -> pb.Consistency:
        """For ConfigureOptimizer."""
        modes = {
            "asp": pb.Consistency.MODE_ASP,
            "ssp": pb.Consistency.MODE_SSP,
            "bsp": pb.Consistency.MODE_BSP,
        }
        return pb.Consistency(mode=modes[self.consistency], bound=self.staleness_bound or 0)


def check_pull_compression(name: str) -> None:
    """Raises ConfigurationError for what does not suit values."""
    suitable = [
        each for each in compressor_names() if compressor_class(each).codec in codecs.FOR_VALUES
    ]
    if name in suitable:
        return
    why = ""
    if name in compressor_names():
        why = (
            f": {name} leaves most of a gradient to later pushes, and what is left out of values "
            "does not come later"
        )
    raise ConfigurationError(
        f"pull_compression={name!r}{why}; expected one of {', '.join(suitable)}, or None"
    )


def check_configuration(config: ShardingConfiguration, backend: str) -> None:
    """Refuses settings that mean nothing without a common step.

    Raises:
        ConfigurationError: one of them, and what to do.
    """
    if backend not in backend_names():
        # async_sgd has no process group, so that any known one will do; a misspelled one would be
        # an error with other strategies.
        raise ConfigurationError(
            f"backend={backend!r}: expected one of {', '.join(backend_names())}"
        )
    compressor = config.compressor
    if isinstance(compressor, PowerSGDCompressor) and compressor.rank > POWERSGD_LARGEST_RANK:
        raise ConfigurationError(
            f'powersgd with rank={compressor.rank} and strategy="async_sgd": parameter servers '
            f"take ranks up to {POWERSGD_LARGEST_RANK}; "
            "2 to 8 is usual"
        )
    if config.deterministic:
        raise ConfigurationError(
            'deterministic=True with strategy="async_sgd": pushes are applied in the order in '
            'which they come; use "ddp" for results that '
            "repeat"
        )


_OR_HERE = ", or give inner_steps=, with which workers run the optimizer"

Values = tuple[tuple[str, float], ...]
"""One group's hyperparameters by the servers' names, sorted."""


# ------------------------------------------------------------------------------------ the optimizer
#
# The user's torch optimizer, as the parameter servers are to run it, and what schedulers change in
# it.
#
# Whose schedule counts, when each worker steps a scheduler of its own at its own speed? The one
# that is furthest: a change carries a revision, the number of changes that this worker's
# hyperparameters have gone through, and a server ignores a revision that is not above its last.
# Equal schedules have equal values at equal revisions, whether they are stepped per iteration or
# per epoch (docs/explanation/parameter-servers.md#schedules-and-optimizers).
#
# All of it runs on the training thread.


@dataclass(frozen=True, kw_only=True)
class Revision:
    """The hyperparameters at one moment of the schedule."""

    number: int
    """0: as configured. Grows by one with every change."""
    groups: tuple[Values, ...]


class ServerOptimizer:
    """The optimizer that the servers run."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        *,
        delay_compensation: float = 0.0,
        argument: str = "optimizer",
    ) -> None:
        """`names`: id(parameter) -> its name among the declared tensors. `delay_compensation`: see
        `AsyncOptions`. `argument`: what the user gave the optimizer as, for errors.

        Raises:
            ConfigurationError: an optimizer that the servers do not have, or not with these
                settings.
        """
        # Exactly these classes: a subclass may override the update, which would be lost without a
        # word.
        declared = (
            one for one in SERVER_OPTIMIZERS.values() if one.optimizer_class() is type(optimizer)
        )
        known = next(declared, None)
        if known is None:
            raise ConfigurationError(
                f"{argument}={type(optimizer).__module__}.{type(optimizer).__qualname__}: with "
                f"async_sgd the parameter servers run the {argument}, and they have {in_words()}; "
                f"use one of these{_OR_HERE if argument == 'optimizer' else ''}"
            )
        for group in optimizer.param_groups:
            if delay_compensation and group["maximize"]:
                raise ConfigurationError(
                    f"delay_compensation={delay_compensation} with maximize=True: it is of a loss "
                    "that falls; negate the loss instead"
                )
            for key, value in known.fixed.items():
                if group.get(key, value) != value:
                    raise ConfigurationError(
                        f"{key}={group[key]!r} in a parameter group of {type(optimizer).__name__}: "
                        f"parameter servers have {value!r}; use an optimizer of which it is so by "
                        "default"
                    )
            for parameter in group["params"]:
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype in known.not_for:
                    raise ConfigurationError(
                        f"parameter {names[id(parameter)]!r} is {dtype}, of which "
                        f"{type(optimizer).__name__} makes NaN where a gradient is zero: its eps "
                        "vanishes there; convert the parameter to float32 or bfloat16, or use "
                        "Adam or AdamW"
                    )
        self._declared = known
        self._delay_compensation = delay_compensation
        self._optimizer = optimizer
        self._tensors = tuple(
            tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups
        )
        self._configured = self._read()
        self._latest = Revision(number=0, groups=self._configured)

    @property
    def spec(self) -> pb.OptimizerSpec:
        """The optimizer as it was when it was handed to `as_distributed`, for the call
        ConfigureOptimizer. The same in every worker, in joiners too."""
        return pb.OptimizerSpec(
            name=self._declared.name,
            hyperparameters=dict(self._configured[0]),
            groups=self._messages(self._configured),
            delay_compensation=self._delay_compensation,
        )

    def check_layout(self, shard_map: coordinator_pb.ShardMap) -> None:
        """Looks at how the tensors are cut over the servers, where the optimizer takes several
        elements together.

        Raises:
            ConfigurationError: a row that has to be whole is cut.
        """
        if self._declared.unit is Unit.ELEMENT:
            return
        pieces = [
            (shard_map.tensors[each.tensor_index], each)
            for partition in shard_map.partitions
            for each in partition.pieces
        ]
        pieces = [(tensor, piece) for tensor, piece in pieces if not tensor.frozen]
        for tensor, piece in pieces:
            row = math.prod(tensor.shape[1:])
            if self._declared.cuts_rows(row=row, offset=piece.offset, length=piece.length):
                raise ConfigurationError(
                    f"parameter {tensor.name!r} has rows of {row} elements, which are longer than "
                    f"what servers hold together (8 MiB), and {type(self._optimizer).__name__} "
                    "needs whole rows; use torch.optim.Adagrad, or give the parameter another "
                    "shape"
                )
        if self._declared.unit is Unit.TENSOR and (
            cut := sorted({tensor.name for tensor, piece in pieces if piece.offset})
        ):
            _log.warning(
                "%s takes each piece of up to 8 MiB of a larger tensor as a tensor of its own, "
                "with a trust ratio of its own: %s%s",
                type(self._optimizer).__name__,
                ", ".join(cut[:5]),
                f" and {len(cut) - 5} more" if len(cut) > 5 else "",
            )

    def look(self) -> Revision:
        """The newest revision; a new one if a scheduler, or the user, has changed something since
        the last look.

        Schedulers read `optimizer.param_groups` at each step of theirs, and every read looks. So
        two scheduler steps in a row are two revisions.
        """
        now = self._read()
        if now != self._latest.groups:
            self._check_structure(now)
            self._latest = Revision(number=self._latest.number + 1, groups=now)
        return self._latest

    def adopt(self, number: int) -> None:
        """The optimizer was given a peer's settings, which are its revision `number`: this worker's
        schedule goes on from there."""
        self._latest = Revision(number=number, groups=self._read())

    def change(self, revision: Revision) -> tuple[dict[str, float], list[pb.ParameterGroup]]:
        """`revision` as SetHyperparameters takes it: for all tensors, and for groups of their
        own."""
        return self._variable(revision.groups[0]), self._messages(
            tuple(tuple(self._variable(values).items()) for values in revision.groups)
        )

    def _read(self) -> tuple[Values, ...]:
        return tuple(
            tuple(sorted(self._declared.read(group).items()))
            for group in self._optimizer.param_groups
        )

    def _messages(self, groups: tuple[Values, ...]) -> list[pb.ParameterGroup]:
        """Nothing for a single group: its hyperparameters are the optimizer's own."""
        if len(groups) == 1:
            return []
        pairs = zip(self._tensors, groups, strict=True)
        return [
            pb.ParameterGroup(tensors=tensors, hyperparameters=dict(values))
            for tensors, values in pairs
            if tensors
        ]

    def _variable(self, values: Values) -> dict[str, float]:
        return {name: value for name, value in values if name not in self._declared.structural}

    def _check_structure(self, now: tuple[Values, ...]) -> None:
        for before, after in zip(self._configured, now, strict=True):
            for name in self._declared.structural:
                if dict(before)[name] != dict(after)[name]:
                    value = dict(after)[name]
                    changed = bool(value) if name in self._declared.switches else value
                    raise ConfigurationError(
                        f"{name} was changed to {changed} while the optimizer runs; it decides "
                        "which state the servers keep: set it before as_distributed"
                    )
