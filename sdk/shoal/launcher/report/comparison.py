"""Compares two past runs, row by row. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.launcher.report.history import RecordedRun, RunEnd

_NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a comparison: a name and its values in two runs."""

    name: str
    values: tuple[str, str]
    change: str = ""
    """Relative change from the first run to the second, such as +3.1%; empty if it would be
    meaningless."""

    @property
    def differs(self) -> bool:
        return self.values[0] != self.values[1]


def compare(one: RecordedRun, other: RecordedRun) -> tuple[list[Row], list[Row]]:
    """Compares two runs. Returns the rows of their results, and the rows of the settings that
    differ."""
    ends = (one.end, other.end)
    results = [
        Row(name="outcome", values=(str(one.outcome), str(other.outcome))),
        _number("steps", *(_of(end, lambda end: end.steps) for end in ends), whole=True),
        _number("samples", *(_of(end, lambda end: end.samples) for end in ends), whole=True),
        _number("seconds", *(_of(end, lambda end: end.seconds) for end in ends)),
        _number("samples/s", *(_of(end, lambda end: end.samples_per_s) for end in ends)),
        _number("steps/s", *(_of(end, _steps_per_s) for end in ends)),
        _number("faults", *(_of(end, lambda end: end.faults) for end in ends), whole=True),
        _number("seconds paused", *(_of(end, lambda end: end.paused_s) for end in ends)),
        _number("loss", *(_of(end, lambda end: end.loss) for end in ends)),
    ]
    results = [row for row in results if row.values != (_NOTHING, _NOTHING)]
    names = dict.fromkeys(name for end in ends if end is not None for name in end.metrics)
    results += [
        _number(name, *(None if end is None else end.metrics.get(name) for end in ends))
        for name in names
    ]
    first, second = _settings(one), _settings(other)
    settings = [
        Row(name=name, values=(first.get(name, _NOTHING), second.get(name, _NOTHING)))
        for name in {**first, **second}
    ]
    return results, [row for row in settings if row.differs]


def _settings(run: RecordedRun) -> dict[str, str]:
    end = run.end
    own = {} if end is None else {"strategy": end.strategy or _NOTHING, "ranks": str(end.ranks)}
    return {
        "script": run.program,
        "arguments": " ".join(run.arguments) or _NOTHING,
        **own,
        **run.settings,
    }


def _of(end: RunEnd | None, value: Callable[[RunEnd], float | None]) -> float | None:
    return None if end is None else value(end)


def _steps_per_s(end: RunEnd) -> float | None:
    return end.steps / end.seconds if end.seconds > 0 else None


def _number(name: str, one: float | None, other: float | None, *, whole: bool = False) -> Row:
    def shown(value: float | None) -> str:
        return _NOTHING if value is None else f"{value:,.0f}" if whole else f"{value:,.4g}"

    change = ""
    if one is not None and other is not None and one and shown(one) != shown(other):
        change = f"{(other - one) / abs(one):+.1%}"
    return Row(name=name, values=(shown(one), shown(other)), change=change)
