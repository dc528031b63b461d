"""Compares the plan of each strategy (`shoal.plan`) with the memory and bytes measured in a run.

The plan is for the decoder of T8. Each strategy then runs with the plan's options, and is measured
as in T8 (`benchmarks.workers.account`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from shoal_worker.planning.plan import Plan, PlannedStrategy
from shoal_worker.planning.planner import plan

from benchmarks.errors import MeasurementError
from benchmarks.memory_and_wire import WIDTH, Account, Case, launch
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.workers import blocks

TOLERANCE: Final = 0.1
_MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A strategy that is run with the options of its plan."""

    label: str
    """Label of the strategy's row in a plan: the strategy and its device mesh."""
    ranks: int
    batch: int = 1
    """Samples per replica per step. For strategies that send activations, the batch is large enough
    that the activations make up most of the bytes sent."""


COMPARED: Final = (
    *(
        Compared(label=label, ranks=ranks)
        for label in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        for ranks in (2, 4)
    ),
    Compared(label="hsdp 2 shards x 2", ranks=4),
    Compared(label="tensor tp2 dp1", ranks=2, batch=16),
    Compared(label="tensor tp4 dp1", ranks=4, batch=16),
    Compared(label="pipeline pp2 dp1", ranks=2, batch=16),
    Compared(label="pipeline pp4 dp1", ranks=4, batch=16),
    Compared(label="hybrid tp2 pp2 dp1", ranks=4, batch=16),
    Compared(label="tensor tp2 dp2", ranks=4, batch=16),
    Compared(label="hybrid tp2 dp2 zero1", ranks=4, batch=16),
    Compared(label="hybrid tp2 dp2 fsdp", ranks=4, batch=16),
    Compared(label="pipeline pp2 dp2", ranks=4, batch=16),
    Compared(label="hybrid pp2 dp2 zero1", ranks=4, batch=16),
    Compared(label="hybrid pp2 dp2 fsdp", ranks=4, batch=16),
    Compared(label="local_sgd", ranks=2),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Planned and measured bytes of one strategy, by category: memory of the training state
    ("held"), memory of mirrors, and bytes sent."""

    planned: Mapping[str, float]
    measured: Mapping[str, float]
    command: str = field(default="")

    def share(self, what: str) -> float:
        """Returns the planned bytes of the category `what`, divided by the measured bytes; 1 if
        both are 0."""
        planned, measured = self.planned[what], self.measured[what]
        return planned / measured if measured else 1.0 if not planned else float("inf")


def plan_of(ranks: int, batch: int, replicas: int) -> Plan:
    """Returns a plan for the decoder."""
    with torch.device("meta"):
        net = blocks.Decoder(WIDTH)
        words = torch.zeros(1, blocks.TOKENS, dtype=torch.long)
    return plan(
        net,
        blocks.optimizer_of(net),
        world_size=ranks,
        example=words,
        targets=words,
        loss_fn=blocks.loss_fn,
        global_batch_size=batch * replicas,
    )


def planned_as(compared: Compared) -> PlannedStrategy:
    """Returns the strategy's row in a plan for its ranks and its batch."""
    found = next(
        each
        for each in plan_of(compared.ranks, compared.batch, compared.ranks).strategies
        if each.label == compared.label
    )
    # with the batch that so many replicas take
    again = plan_of(compared.ranks, compared.batch, found.data)
    return next(each for each in again.strategies if each.label == compared.label)


def compare(compared: Compared) -> Outcome:
    """Runs the strategy with the planned options, and returns planned and measured bytes. Raises
    MeasurementError if the run fails."""
    planned = planned_as(compared)
    assert planned.memory is not None
    case = Case(
        strategy=planned.strategy,
        held=None,
        sent=None,
        options=planned.options,
        ranks=(compared.ranks,),
        replicas=lambda _: planned.data,
        batch=compared.batch,
    )
    more = ("--replicas", str(planned.data), "--options", json.dumps(dict(planned.options)))
    account = Account.of(launch(case, compared.ranks, more), with_received=False)
    memory = planned.memory
    return Outcome(
        planned={
            "held": memory.held,
            "mirrors": memory.mirrors,
            "sent": planned.sent,
            "total": memory.total,
        },
        measured={
            "held": account.held + account.mirrors,
            "mirrors": account.mirrors,
            "sent": account.sent + account.sent_to_mirrors,
            "total": account.peak,
        },
        command=_command(compared, planned.options, planned),
    )


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 3 minutes."""
    rows = [_row(each) for each in (COMPARED[:2] if options.quick else COMPARED)]
    return Table(
        key="t18",
        title="Plans against runs: memory and bytes on the wire",
        target=f"held memory and bytes sent within {TOLERANCE:.0%} of what is measured",
        method=(
            "The decoder of T8 with AdamW is planned with `shoal.plan` for a number of ranks, "
            "then started with that number of ranks and the options of the plan, and measured as "
            "in T8: memory from distinct storages, bytes sent from the kernel, and the peak from "
            "torch's allocator. Held: parameters, gradients, optimizer state and mirrors of the "
            "rank with the most. Sent: bytes per rank per step, including those to mirrors, as "
            "the mean of the ranks. The total of a plan also includes temporary memory and "
            "activations, and is compared with the measured peak. Columns are in MiB; ratios "
            "divide planned by measured values."
        ),
        columns=(
            *("held, planned", "held, measured", "share of held"),
            *("sent, planned", "sent, measured", "share of sent"),
            *("total, planned", "peak, measured", "share of peak"),
        ),
        rows=tuple(rows),
        verdict=_verdict(rows),
    )


def _row(compared: Compared) -> Row:
    name = f"{compared.label}, {compared.ranks} ranks"
    try:
        outcome = compare(compared)
    except MeasurementError as error:
        return Row(name=name, command="", cells={}, failure=str(error))
    cells: dict[str, str] = {}
    for what, measured, share in (
        ("held", "held", "share of held"),
        ("sent", "sent", "share of sent"),
        ("total", "peak", "share of peak"),
    ):
        cells[f"{what}, planned"] = f"{outcome.planned[what] / _MIB:.2f}"
        cells[f"{measured}, measured"] = f"{outcome.measured[what] / _MIB:.2f}"
        cells[share] = f"{outcome.share(what):.3f}"
    samples: dict[str, Sequence[float]] = {
        f"share_of_{what}": [outcome.share(what)] for what in ("held", "sent", "total")
    }
    return Row(name=name, command=outcome.command, cells=cells, samples=samples)


def _command(compared: Compared, options: Mapping[str, Any], planned: PlannedStrategy) -> str:
    run = f"shoal run --standalone --nproc-per-node {compared.ranks} -m benchmarks.workers.account"
    return (
        f"{run} --strategy {planned.strategy} --replicas {planned.data} --options "
        f"'{json.dumps(dict(options))}'"
    )


def _verdict(rows: Sequence[Row]) -> str:
    shares = {
        f"{row.name}: {name.removeprefix('share_of_')} {values[0]:.2f} x": values[0]
        for row in rows
        for name, values in row.samples.items()
        if name != "share_of_total"
    }
    peaks = [row.samples["share_of_total"][0] for row in rows if row.samples]
    if not shares:
        return "Not measured."
    far = [text for text, share in shares.items() if abs(share - 1) > TOLERANCE]
    parts = [
        f"Measured: {len(shares) - len(far)} of {len(shares)} figures are within {TOLERANCE:.0%}"
    ]
    parts += [f"others: {', '.join(far)}"] if far else []
    return (
        "; ".join(
            [*parts, f"totals are {min(peaks):.2f} to {max(peaks):.2f} times the measured peaks"]
        )
        + "."
    )
