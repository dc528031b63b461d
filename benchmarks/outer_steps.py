"""T16: compares async_sgd with and without outer steps: the bytes that workers and servers
exchange, and the loss after the same number of samples."""

from __future__ import annotations

import json
import shlex
import statistics
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.errors import MeasurementError
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import start_outer
from benchmarks.workers.train_straggler import TRAINED_ON

RANKS: Final = 4
BATCH: Final = 4
EPOCHS: Final = 8
LEARNING_RATES: Final = (0.003, 0.001, 0.01)
_LONGEST_S: Final = 120.0
_WORKER: Final = "benchmarks.workers.train_outer"


@dataclass(kw_only=True)
class System:
    """One combination of inner steps and outer optimizer, and the results of its runs."""

    name: str
    flags: tuple[str, ...]
    learning_rate: float | None = None
    """Learning rate with the lowest loss at the end; None: no run has finished."""
    losses: dict[float, list[float]] = field(default_factory=dict)
    """Learning rate -> loss at the end of each run."""
    megabytes: list[float] = field(default_factory=list)
    """Megabytes sent and received by all workers together, one value per run."""
    failure: str = ""

    def words(self, learning_rate: float) -> list[str]:
        """Returns the flags of the worker program, except for the output file."""
        sizes = (f"--ranks={RANKS}", f"--batch={BATCH}", f"--epochs={EPOCHS}")
        return [*self.flags, f"--learning-rate={learning_rate:g}", *sizes]

    @property
    def command(self) -> str:
        """Command of a run with the best learning rate, for display in the table."""
        words = shlex.join([*self.words(self.learning_rate or LEARNING_RATES[0]), "--output=."])
        return (
            f"SHOAL_SERVER_TRANSPORT=tcp shoal run --standalone --nproc-per-node {RANKS} "
            f"--servers 1 -m {_WORKER} {words}"
        )


def systems() -> list[System]:
    """Returns all systems, plain async_sgd first."""
    return [
        System(name="async_sgd", flags=()),
        *(
            System(
                name=f"inner_steps={steps}, DelayedNesterov(every={RANKS})",
                flags=(f"--inner-steps={steps}",),
            )
            for steps in (1, 8, 32)
        ),
        System(
            name="inner_steps=8, SGD(0.7, momentum=0.9, nesterov=True)",
            flags=("--inner-steps=8", "--outer=nesterov"),
        ),
        System(
            name=f"inner_steps=8, SGD({1 / RANKS:g})", flags=("--inner-steps=8", "--outer=mean")
        ),
    ]


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 10 minutes; with `quick`, which tries
    only one learning rate, about 3."""
    all_of_them = systems()
    rates, repeats = (LEARNING_RATES[:1], 1) if options.quick else (LEARNING_RATES, 2)
    for system in all_of_them:
        for rate in rates:
            _run(system, rate)
        means = {rate: losses[0] for rate, losses in system.losses.items()}
        system.learning_rate = min(means, key=means.__getitem__, default=None)
        for _ in range(repeats - 1):
            if system.learning_rate is not None:
                _run(system, system.learning_rate)
    return Table(
        key="t16",
        title="Outer steps: bytes moved, and the loss after the same samples",
        target="inner_steps=H moves 1/H of async_sgd's bytes",
        method=(
            f"{RANKS} workers at full speed and one parameter server train the perceptron of T10 "
            f"for {EPOCHS} epochs of {TRAINED_ON} of scikit-learn's handwritten digits, {BATCH} "
            "per step, with asp and AdamW, which runs on the server or, with inner steps, on the "
            "workers. The loss is the cross-entropy on the other images after training. Bytes are "
            "counted on the TCP connections of all workers in both directions, including "
            "heartbeats and leases. The learning rate of each row is the one of "
            f"{', '.join(f'{rate:g}' for rate in sorted(rates))} with the lowest loss in one run "
            f"each; the loss is the mean of {repeats} runs with it."
        ),
        columns=("learning rate", "MB moved", "of async_sgd", "loss"),
        rows=tuple(row(system, all_of_them[0]) for system in all_of_them),
        verdict=verdict(all_of_them),
    )


def _run(system: System, learning_rate: float) -> None:
    try:
        with Stage() as stage:
            outputs = [stage.directory / f"{rank}.json" for rank in range(RANKS)]
            words = (*system.words(learning_rate), f"--output={stage.directory}")
            start_outer(stage, ranks=RANKS, words=words)
            stage.wait_until(
                system.name,
                lambda: all(output.exists() for output in outputs),
                timeout_s=_LONGEST_S,
            )
            found: list[dict[str, Any]] = [json.loads(output.read_text()) for output in outputs]
    except MeasurementError as error:
        system.failure = str(error)
        return
    system.losses.setdefault(learning_rate, []).append(found[0]["loss"])
    system.megabytes.append(sum(each["sent"] + each["received"] for each in found) / 1e6)


# ---------------------------------------------------------------------------------------- the table


def row(system: System, plain: System) -> Row:
    """Returns a row of the table, compared with plain async_sgd."""
    cells: dict[str, str] = {}
    if system.learning_rate is not None:
        cells = {
            "learning rate": f"{system.learning_rate:g}",
            "MB moved": f"{statistics.median(system.megabytes):.1f}",
            "loss": f"{statistics.mean(system.losses[system.learning_rate]):.3f}",
        }
        if (share := share_of(system, plain)) is not None and system is not plain:
            cells["of async_sgd"] = f"{100 * share:.1f} %"
    samples = {f"loss_at_{rate:g}": losses for rate, losses in system.losses.items()} | {
        "megabytes": system.megabytes
    }
    return Row(
        name=system.name,
        command=system.command,
        cells=cells,
        samples=samples,
        failure=system.failure,
    )


def share_of(system: System, plain: System) -> float | None:
    """Returns the bytes that `system` exchanged, divided by those of `plain`; None if either was
    not measured."""
    if not system.megabytes or not plain.megabytes:
        return None
    return statistics.median(system.megabytes) / statistics.median(plain.megabytes)


def verdict(all_of_them: list[System]) -> str:
    """Returns a sentence with the bytes exchanged by each system."""
    plain, *others = all_of_them
    shares = ((system.name, share_of(system, plain)) for system in others)
    measured_text = (
        f"{name} {'not measured' if share is None else f'{100 * share:.1f} %'}"
        for name, share in shares
    )
    return f"Measured: bytes divided by async_sgd's: {'; '.join(measured_text)}."
