"""The result of planning: the costs of strategies, as an object and as text for terminals of 100
columns."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal_worker.planning.costs import Memory, Traffic, sent
from shoal_worker.planning.step_time import Assumptions, Estimate
from shoal_worker.planning.units import readable_bytes, readable_seconds, scale_for


@dataclass(frozen=True, kw_only=True)
class PlannedStrategy:
    """Costs of one strategy on one mesh."""

    strategy: str
    label: str
    """Short name of the strategy and its mesh: `hybrid tp8 pp2 dp4 zero1`."""
    options: Mapping[str, Any]
    """Keyword arguments of `as_distributed`, except `strategy`."""
    data: int
    """Number of replicas. For strategies without replicas, number of ranks among which the batch is
    divided."""
    tensor: int
    pipeline: int
    samples: int
    """Number of samples that each of the `data` replicas or ranks processes in a step."""
    memory: Memory | None
    """Memory in bytes on the rank that uses the most; None: the model cannot be trained in this
    way."""
    traffic: tuple[Traffic, ...]
    estimate: Estimate | None
    """Estimated time; None: unknown, because no example inputs were given."""
    fits: bool
    reason: str
    """Reason why the strategy does not fit or cannot be used; empty if it fits."""

    @property
    def exact(self) -> bool:
        """True if the strategy gives the same result as a single process that trains on the entire
        batch."""
        return self.strategy != "local_sgd"

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step, averaged across ranks. Without example inputs,
        excludes activations."""
        return sent(self.traffic)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of strategies, sorted from best to worst. `print(plan)` prints a table."""

    model: str
    parameters: int
    """Number of parameter elements."""
    parameter_bytes: int
    optimizer: str
    world_size: int
    global_batch_size: int | None
    """Number of samples in a step; None: unknown, because no example inputs were given."""
    device_memory: int | None
    """Bytes of memory on each rank; None: unlimited."""
    assumptions: Assumptions
    strategies: tuple[PlannedStrategy, ...]
    """All planned strategies, in this order: strategies that fit, the fastest first; strategies
    that fit but change the result (local_sgd); strategies that do not fit; impossible
    strategies."""

    @property
    def recommended(self) -> PlannedStrategy | None:
        """The fastest strategy that fits and gives the same result as a single process. Without an
        example, the simplest such strategy. None: no strategy fits."""
        return next((each for each in self.strategies if each.fits and each.exact), None)

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON types, with memory in bytes and times in seconds."""
        best = self.recommended
        content = dataclasses.asdict(self)
        for entry, each in zip(content["strategies"], self.strategies, strict=True):
            entry |= {"exact": each.exact, "sent": each.sent, "recommended": each is best}
            if each.memory is not None:
                entry["memory"] |= {"held": each.memory.held, "total": each.memory.total}
        return content


# ------------------------------------------------------------------------------------------ as text

WIDTH: Final = 100
_NOTHING: Final = "-"
_NAMES: Final = (
    "tp, pp and dp: ranks along the tensor, pipeline and data axes. hsdp: shards of a replica x "
    "replicas. activ.: activations. sent: by a rank in a step. bubble: a stage's idle share of a "
    "step"
)
_MOST: Final = 16
"""Number of rows of each kind shown by default."""


def render(plan: Plan, *, everything: bool = False) -> str:
    """Returns the plan as lines of text of at most `WIDTH` columns. `everything`: True to include
    all rows."""
    fitting = [each for each in plan.strategies if each.fits]
    too_large = [each for each in plan.strategies if not each.fits and each.memory is not None]
    impossible = [each for each in plan.strategies if each.memory is None]
    lines = [*_head(plan), "", *_recommendation(plan), ""]
    most = len(plan.strategies) if everything else _MOST
    rows = [*_shown(fitting, most), *_shown(too_large, most)]
    unit, scale = scale_for(
        max((each.memory.total for each in rows if each.memory is not None), default=1.0) / 10
    )
    kept = len(_shown(fitting, most))
    named = any(each.tensor * each.pipeline > 1 or each.strategy == "hsdp" for each in rows)
    table = _columns(unit, [_row(each, plan, scale) for each in rows])
    if kept:
        lines += table[: kept + 1]
        lines += _left_out(len(fitting) - kept, "fit as well")
    if too_large:
        assert plan.device_memory is not None
        lines += [
            "",
            f"Too large for {readable_bytes(plan.device_memory)} a rank, of which a tenth is left "
            "free:",
            "",
        ]
        lines += [table[0], *table[kept + 1 :]]
        lines += _left_out(len(too_large) - (len(rows) - kept), "are too large as well")
    if impossible:
        lines += ["", "Not possible:"]
        for reason, labels in _by_reason(impossible).items():
            lines += textwrap.wrap(
                f"{_abbreviated(labels)}: {reason}",
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
            )
    if named:
        lines += ["", *textwrap.wrap(_NAMES, WIDTH)]
    return "\n".join(line.rstrip() for line in lines)


def _shown(rows: Sequence[PlannedStrategy], most: int) -> list[PlannedStrategy]:
    """Returns the first `most` rows, followed by the first row of each strategy that is not among
    them."""
    first = list(rows[:most])
    there = {each.strategy for each in first}
    for each in rows[most:]:
        if each.strategy not in there:
            there.add(each.strategy)
            first.append(each)
    return first


def _left_out(number: int, what: str) -> list[str]:
    return [f"{number} more {what}; use --all or plan.strategies to see them"] if number > 0 else []


def _head(plan: Plan) -> list[str]:
    assumed = plan.assumptions
    memory = (
        f", {readable_bytes(plan.device_memory)} each" if plan.device_memory is not None else ""
    )
    lines = [
        f"{plan.model}: {_count(plan.parameters)} parameters, "
        f"{readable_bytes(plan.parameter_bytes)}, {plan.optimizer}",
        f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}, {assumed.ranks_per_host} a "
        f"host{memory}",
    ]
    if plan.global_batch_size is not None:
        lines.append(
            f"steps of {plan.global_batch_size} samples, estimated with "
            f"{_rate(assumed.device_flops)}FLOP/s x {assumed.efficiency:g}, "
            f"{_rate(assumed.bandwidth)}B/s to other hosts, "
            f"{_rate(assumed.local_bandwidth)}B/s within"
        )
    else:
        lines += textwrap.wrap(
            "no example of the model's inputs: the plan omits activations, times, and the "
            "traffic of tensor and pipeline parallelism",
            WIDTH,
        )
    return lines


def _recommendation(plan: Plan) -> list[str]:
    best = plan.recommended
    if best is None:
        return [
            "recommended: none, because no strategy fits; more ranks, smaller batches or "
            "activation_checkpointing= would help"
        ]
    words = ", ".join(
        [
            f'strategy="{best.strategy}"',
            *(f"{name}={json.dumps(value)}" for name, value in best.options.items()),
        ]
    )
    call = f"shoal.as_distributed(model, optimizer, {words})"
    return textwrap.wrap(f"recommended: {call}", WIDTH, subsequent_indent="    ")


def _row(each: PlannedStrategy, plan: Plan, scale: int) -> tuple[str, ...]:
    memory = each.memory
    assert memory is not None
    roles = (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.mirrors,
        memory.staging,
        memory.activations,
        memory.total,
    )
    known = each.estimate is not None or each.tensor * each.pipeline == 1
    return (
        f"{'*' if each is plan.recommended else ' '} {each.label}",
        *(_NOTHING if size is None else _figure(size / scale) for size in roles),
        _figure(each.sent / scale) if known else _NOTHING,
        f"{each.estimate.bubble:.0%}"
        if each.estimate is not None and each.pipeline > 1
        else _NOTHING,
        readable_seconds(each.estimate.seconds) if each.estimate is not None else _NOTHING,
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _columns(unit: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    head = (
        f"  {unit} a rank",
        "params",
        "grads",
        "state",
        "mirrors",
        "staging",
        "activ.",
        "total",
        "sent",
        "bubble",
        "step",
    )
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        " ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in (head, *rows)
    ]


def _by_reason(strategies: Iterable[PlannedStrategy]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in strategies:
        found.setdefault(each.reason, []).append(each.label)
    return found


def _abbreviated(labels: Sequence[str]) -> str:
    return (
        ", ".join(labels)
        if len(labels) <= 4
        else f"{labels[0]}, {labels[1]} and {len(labels) - 2} more"
    )


def _count(number: float) -> str:
    words = ((1e9, "billion"), (1e6, "million"))
    return next(
        (f"{number / scale:.1f} {word}" for scale, word in words if number >= scale),
        f"{number:,.0f}",
    )


def _rate(rate: float) -> str:
    return next(
        (
            f"{rate / scale:g} {prefix}"
            for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"))
            if rate >= scale
        ),
        f"{rate:g} ",
    )
