"""Options that `as_distributed` accepts only with `strategy="async_sgd"`, and `ServerOptimizer`,
which describes the user's optimizer to the servers. This module does not communicate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from shoal_common.errors import ConfigurationError
from shoal_common.formats import codecs
from shoal_common.formats.codecs import POWERSGD_LARGEST_RANK
from shoal_common.optimizers.for_servers import SERVER_OPTIMIZERS, Unit, in_words
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
        ConfigurationError: a value is invalid, or two values contradict each other.
    """

    consistency: str = "asp"
    """Consistency model. "asp": no worker waits. "ssp": a worker that is more than
    `staleness_bound` iterations ahead of the slowest worker waits at the end of its step. "bsp":
    all workers that take part in an iteration use the same values, which include all pushes of the
    previous iteration."""
    staleness_bound: int | None = None
    """Maximum number of iterations (>= 0) that a worker may be ahead of the slowest worker.
    Required with ssp; not allowed otherwise."""
    pull_every: int = 1
    """Interval between pulls, in steps (>= 1). Larger values save up to half of the traffic, at the
    cost of gradients that are computed on older values."""
    prefetch: bool = False
    """True to pull values while the next batch is computed, instead of waiting for them. Steps no
    longer include the time of a pull, but gradients are computed on values that are up to one pull
    older. Only allowed with "asp"."""
    server_timeout: timedelta = timedelta(minutes=5)
    """Maximum time that a parameter server may be unreachable (for example while restarting) before
    `optimizer.step()` fails."""

    lease_ahead: timedelta = timedelta(seconds=20)
    """Amount of work that a worker leases in advance, as a duration of training at its current
    pace. It can train for about this long while the coordinator is unreachable. If a worker dies,
    its leased batches are reassigned. 0: each batch is leased separately."""

    delay_compensation: float = 0.0
    """Strength (>= 0) of the servers' compensation for the staleness of gradients (DC-ASGD; Zheng
    et al., ICML 2017). 0 disables it; 0.04 is a good first value. A server may need memory for one
    more copy of its partitions per worker."""

    pull_compression: str | None = None
    """Rounding of values sent by the servers: "bf16", "fp16" or "int8"; None: no rounding. The
    servers keep full precision; gradients are computed on the rounded values. Initial values,
    frozen parameters and `full_state_dict` are never rounded."""

    inner_steps: int | None = None
    """Number of steps (>= 1) that the worker takes with its own optimizer before it pushes their
    total change as one gradient to `outer_optimizer`, which the servers run (DiLoCo; Douillard et
    al., 2023, algorithm 1). Must be the same on all workers. None: each step pushes its gradients,
    and the servers run the user's optimizer."""
    outer_optimizer: torch.optim.Optimizer | None = None
    """Optimizer that the servers run; required with `inner_steps`. It must be of a kind that the
    servers support, and have the same parameters. For K workers,
    `shoal.optim.DelayedNesterov(net.parameters(), every=K)` uses the paper's learning rate and
    momentum."""

    def __post_init__(self) -> None:
        if self.pull_compression is not None:
            check_pull_compression(self.pull_compression)
        if self.consistency not in ("asp", "ssp", "bsp"):
            raise ConfigurationError(
                f'consistency={self.consistency!r}: expected "asp", "ssp" or "bsp"'
            )
        if self.consistency == "ssp" and self.staleness_bound is None:
            raise ConfigurationError(
                'consistency="ssp" needs staleness_bound=, the number of iterations that a '
                "worker may be ahead of the slowest, such as 3"
            )
        if self.consistency != "ssp" and self.staleness_bound is not None:
            why = (
                ("which makes no worker wait")
                if self.consistency == "asp"
                else "which makes workers proceed in step"
            )
            raise ConfigurationError(
                f'staleness_bound={self.staleness_bound} with consistency="{self.consistency}", '
                f'{why}; use consistency="ssp", or leave staleness_bound out'
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
                f'pull_every={self.pull_every} with consistency="{self.consistency}", which makes '
                'workers wait at every pull; use pull_every=1, or consistency="asp"'
            )
        if self.prefetch and (
            self.waits_for_others or self.delay_compensation or self.inner_steps is not None
        ):
            other = (
                f'consistency="{self.consistency}", which makes workers wait at every pull'
                if self.waits_for_others
                else (
                    f"inner_steps={self.inner_steps}: the next inner steps start from the pulled "
                    "values"
                )
                if self.inner_steps is not None
                else (
                    f"delay_compensation={self.delay_compensation}: servers assume that each "
                    "gradient was computed from the values they sent last"
                )
            )
            raise ConfigurationError(
                f"prefetch=True cannot be used with {other}; leave prefetch out"
            )
        if not isinstance(self.server_timeout, timedelta) or self.server_timeout <= timedelta(0):
            raise ConfigurationError(
                f"server_timeout={self.server_timeout!r}: expected a positive timedelta"
            )
        if not isinstance(self.lease_ahead, timedelta) or self.lease_ahead < timedelta(0):
            raise ConfigurationError(
                f"lease_ahead={self.lease_ahead!r}: expected a timedelta of at least 0"
            )
        strength = self.delay_compensation
        if (
            isinstance(strength, bool)
            or not isinstance(strength, int | float)
            or not (math.isfinite(strength) and strength >= 0)
        ):
            raise ConfigurationError(
                f"delay_compensation={strength!r}: expected a finite, non-negative number, such "
                "as 0.04"
            )
        self._check_rounds()

    def _check_rounds(self) -> None:
        outer, steps = self.outer_optimizer, self.inner_steps
        if steps is None:
            if outer is not None:
                raise ConfigurationError(
                    f"outer_optimizer={type(outer).__name__} without inner_steps=: pass the "
                    "number of steps that a worker takes before each push, such as inner_steps=32"
                )
            return
        if type(steps) is not int or steps < 1:
            raise ConfigurationError(
                f"inner_steps={steps!r}: expected a whole number of steps, at least 1"
            )
        if not isinstance(outer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"outer_optimizer={outer!r} with inner_steps={steps}: expected the optimizer for "
                "the servers to run, created from the model's parameters, such as "
                "shoal.optim.DelayedNesterov(net.parameters(), every=4) for 4 workers"
            )
        if self.pull_every > 1:
            raise ConfigurationError(
                f"pull_every={self.pull_every} with inner_steps={steps}: each push ends with a "
                "pull, from which the next inner steps start. Leave pull_every out, or raise "
                "inner_steps"
            )
        if self.delay_compensation:
            raise ConfigurationError(
                f"delay_compensation={self.delay_compensation} with inner_steps={steps}: it needs "
                "the gradient of one batch, whose square approximates the curvature, but inner "
                "steps push a sum of updates. Leave delay_compensation out"
            )

    @property
    def waits_for_others(self) -> bool:
        """True if a worker may have to wait for other workers (ssp and bsp)."""
        return self.consistency != "asp"

    @property
    def in_step(self) -> bool:
        """True if all workers use the same values in each iteration (bsp)."""
        return self.consistency == "bsp"

    def message(self) -> pb.Consistency:
        """Returns the consistency model as the protobuf message of the ConfigureOptimizer RPC."""
        modes = {
            "asp": pb.Consistency.MODE_ASP,
            "ssp": pb.Consistency.MODE_SSP,
            "bsp": pb.Consistency.MODE_BSP,
        }
        return pb.Consistency(mode=modes[self.consistency], bound=self.staleness_bound or 0)


def check_pull_compression(name: str) -> None:
    """Raises ConfigurationError unless `name` is a supported compression of values."""
    suitable = [
        each for each in compressor_names() if compressor_class(each).codec in codecs.FOR_VALUES
    ]
    if name in suitable:
        return
    why = ""
    if name in compressor_names():
        why = (
            f": {name} leaves most of a gradient to later pushes, but values left out of a pull "
            "are never sent"
        )
    raise ConfigurationError(
        f"pull_compression={name!r}{why}; expected one of {', '.join(suitable)}, or None"
    )


def check_configuration(config: ShardingConfiguration, backend: str) -> None:
    """Rejects settings that only make sense if all workers take steps together.

    Raises:
        ConfigurationError: such a setting is present; the message explains the remedy."""
    if backend not in backend_names():
        # async_sgd has no process group, so every known backend is accepted. A misspelled name is
        # an error, as with other strategies.
        raise ConfigurationError(
            f"backend={backend!r}: expected one of {', '.join(backend_names())}"
        )
    compressor = config.compressor
    if isinstance(compressor, PowerSGDCompressor) and compressor.rank > POWERSGD_LARGEST_RANK:
        raise ConfigurationError(
            f'powersgd with rank={compressor.rank} and strategy="async_sgd": parameter servers '
            f"support ranks up to {POWERSGD_LARGEST_RANK}; 2 to 8 are usual"
        )
    if config.deterministic:
        raise ConfigurationError(
            'deterministic=True with strategy="async_sgd": pushes are applied in order of '
            'arrival, so results differ between runs; use "ddp" for reproducible results'
        )


_OR_HERE = ", or pass inner_steps= to run the optimizer in the workers"

Values = tuple[tuple[str, float], ...]
"""Hyperparameters of one parameter group, sorted, under the names that the servers use."""


# ------------------------------------------------------------------------------------ the optimizer
#
# The user's torch optimizer, to be run by the parameter servers, and the changes that schedulers
# make to it. If each worker steps its own scheduler at its own speed, the scheduler that has
# advanced furthest determines the hyperparameters: a change is sent with a revision, which counts
# the changes of this worker's hyperparameters so far, and a server ignores a revision that is not
# higher than its last. The same schedule has the same values at the same revision, whether it is
# stepped per iteration or per epoch
# (docs/explanation/parameter-servers.md#schedules-and-optimizers). Everything runs on the training
# thread.


@dataclass(frozen=True, kw_only=True)
class Revision:
    """Hyperparameters after a number of changes."""

    number: int
    """Number of changes so far; 0: the configured hyperparameters."""
    groups: tuple[Values, ...]


class ServerOptimizer:
    """Describes the optimizer that the servers run, and tracks changes to its hyperparameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        *,
        delay_compensation: float = 0.0,
        argument: str = "optimizer",
    ) -> None:
        """Describes the optimizer for the servers. `names`: id(parameter) -> name of the declared
        tensor. `delay_compensation`: see `AsyncOptions`. `argument`: name of the user's argument,
        for errors.

        Raises:
            ConfigurationError: the servers do not support this optimizer or these settings.
        """
        # Exactly these classes are allowed: a subclass may override the update, which the servers
        # would silently ignore.
        declared = (
            one for one in SERVER_OPTIMIZERS.values() if one.optimizer_class() is type(optimizer)
        )
        known = next(declared, None)
        if known is None:
            raise ConfigurationError(
                f"{argument}={type(optimizer).__module__}.{type(optimizer).__qualname__}: with "
                f"async_sgd the parameter servers run the {argument}, but they support only "
                f"{in_words()}; use one of these{_OR_HERE if argument == 'optimizer' else ''}"
            )
        # Adagrad creates its state in the constructor.
        if any(
            state.get("step", 1) and any(value is not None for value in state.values())
            for state in optimizer.state.values()
        ):
            raise ConfigurationError(
                f"{argument}={type(optimizer).__name__} has already taken steps: with async_sgd "
                "the parameter servers run it, and they would start without its momentum or "
                f"moments; pass a new one{_OR_HERE if argument == 'optimizer' else ''}, or use "
                "strategy='ddp'"
            )
        for group in optimizer.param_groups:
            if delay_compensation and group["maximize"]:
                raise ConfigurationError(
                    f"delay_compensation={delay_compensation} with maximize=True: delay "
                    "compensation is derived for a loss that is minimized; negate the loss "
                    "instead"
                )
            for key, value in known.fixed.items():
                if group.get(key, value) != value:
                    raise ConfigurationError(
                        f"{key}={group[key]!r} in a parameter group of {type(optimizer).__name__}: "
                        f"parameter servers support only {key}={value!r}; use an optimizer with "
                        "that default"
                    )
            for parameter in group["params"]:
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype in known.not_for:
                    raise ConfigurationError(
                        f"parameter {names[id(parameter)]!r} is {dtype}, for which "
                        f"{type(optimizer).__name__} computes NaN if a gradient is zero, because "
                        "its eps underflows; convert the parameter to float32 or bfloat16, or "
                        "use Adam or AdamW"
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
        """The settings that the optimizer had when `as_distributed` was called, for the
        ConfigureOptimizer RPC. They are the same on every worker, including joiners."""
        return pb.OptimizerSpec(
            name=self._declared.name,
            hyperparameters=dict(self._configured[0]),
            groups=self._messages(self._configured),
            delay_compensation=self._delay_compensation,
        )

    def check_layout(self, shard_map: coordinator_pb.ShardMap) -> None:
        """Checks that the optimizer can update the tensors in the pieces into which `shard_map`
        divides them. Some optimizers compute an update from all elements of a row or of a tensor.
        Logs a warning if a tensor is divided and the optimizer computes one update per tensor.

        Raises:
            ConfigurationError: a row is divided between servers, but the optimizer needs entire
                rows.
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
                    f"parameter {tensor.name!r} has rows of {row} elements, which exceed the 8 "
                    f"MiB that a server keeps together, but {type(self._optimizer).__name__} "
                    "needs whole rows; use torch.optim.Adagrad, or reshape the parameter"
                )
        if self._declared.unit is Unit.TENSOR and (
            cut := sorted({tensor.name for tensor, piece in pieces if piece.offset})
        ):
            _log.warning(
                "tensors larger than 8 MiB are divided into pieces on the parameter servers, and "
                "%s computes a separate trust ratio for each piece: %s%s",
                type(self._optimizer).__name__,
                ", ".join(cut[:5]),
                f" and {len(cut) - 5} more" if len(cut) > 5 else "",
            )

    def look(self) -> Revision:
        """Returns the newest revision of the hyperparameters. Creates a new revision if a scheduler
        or the user has changed any of them since the last call.

        Schedulers read `optimizer.param_groups` in each step, and every read calls this method. Two
        scheduler steps in a row therefore create two revisions.
        """
        now = self._read()
        if now != self._latest.groups:
            self._check_structure(now)
            self._latest = Revision(number=self._latest.number + 1, groups=now)
        return self._latest

    def adopt(self, number: int) -> None:
        """Continues from a peer's hyperparameters after they have been loaded into the optimizer.
        `number`: number of the peer's revision."""
        self._latest = Revision(number=number, groups=self._read())

    def change(self, revision: Revision) -> tuple[dict[str, float], list[pb.ParameterGroup]]:
        """Returns `revision` as arguments of the SetHyperparameters RPC: the hyperparameters for
        all tensors, and those of each group if there are several groups."""
        return self._variable(revision.groups[0]), self._messages(
            tuple(tuple(self._variable(values).items()) for values in revision.groups)
        )

    def _read(self) -> tuple[Values, ...]:
        return tuple(
            tuple(sorted(self._declared.read(group).items()))
            for group in self._optimizer.param_groups
        )

    def _messages(self, groups: tuple[Values, ...]) -> list[pb.ParameterGroup]:
        """Returns one message per parameter group, or none if there is only one group: its
        hyperparameters are sent as those of the whole optimizer."""
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
                        f"{name} was changed to {changed} after as_distributed, but it determines "
                        "which state the servers keep; set it before as_distributed"
                    )
