"""Plans compared with ranks that are processes, over Gloo: bytes of storages, and bytes that the
kernel has sent."""

from __future__ import annotations

import pytest

from benchmarks.planned import COMPARED, TOLERANCE, Compared, compare

_HELD = [each for each in COMPARED if each.ranks == 2 and each.label != "local_sgd"]


def _case(compared: Compared) -> object:
    mark = pytest.mark.slow if compared.label in ("zero2", "tensor tp2 dp1") else pytest.mark.matrix
    return pytest.param(compared, id=compared.label, marks=mark)


@pytest.mark.parametrize("compared", [_case(each) for each in _HELD])
def test_run_uses_the_memory_and_traffic_that_were_planned(compared: Compared) -> None:
    outcome = compare(compared)
    assert outcome.planned["held"] == pytest.approx(outcome.measured["held"], rel=TOLERANCE)
    assert outcome.planned["mirrors"] == pytest.approx(outcome.measured["mirrors"], rel=TOLERANCE)
    assert outcome.planned["sent"] == pytest.approx(outcome.measured["sent"], rel=TOLERANCE)


def test_plans_are_compared_with_runs_of_the_strategies_that_synchronize_every_step() -> None:
    assert {each.label.split()[0] for each in _HELD} == {
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
        "tensor",
        "pipeline",
    }
