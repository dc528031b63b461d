"""Table T9 (slow links): the rows of each system and the comparison with the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.compression_link import System, _rows, _verdict


def system(
    name: str, seconds: float, steps: int, *, reached: bool = True, sent: float = 1000.0
) -> System:
    run: dict[str, Any] = {
        "seconds": [seconds] * steps,
        "reached": reached,
        "sent_bytes_per_step": sent,
        "formula_bytes": 1_000_000,
    }
    return System(name=name, flags=("--system=shoal",), runs=[run])


def test_speed_is_time_to_the_loss_and_not_time_per_step() -> None:
    fp32, bf16, quick = (
        system("fp32", 0.5, 50),
        system("bf16", 0.25, 50),
        system("topk", 1 / 64, 100),
    )
    row = _rows([fp32, bf16, quick], fp32, bf16)[2]
    assert row.cells["steps"] == "100"
    assert row.cells["ms per step"] == "15.6"
    assert (row.cells["kB per step"], row.cells["formula kB"], row.cells["formula ms"]) == (
        "1.0",
        "1000.0",
        "80.0",
    )
    assert (row.cells["s to loss"], row.cells["x fp32"], row.cells["x bf16"]) == (
        "1.56",
        "16.0",
        "8.0",
    )
    assert (
        _verdict([fp32, bf16, quick], fp32, bf16)
        == "Measured: topk, 8.0 x bf16 (reached), 16.0 x fp32 (reached)."
    )


def test_system_that_does_not_learn_is_not_fast() -> None:
    fp32, bf16, diverged = (
        system("fp32", 0.4, 50),
        system("bf16", 0.2, 50),
        system("sign", 0.01, 201, reached=False),
    )
    row = _rows([fp32, bf16, diverged], fp32, bf16)[2]
    assert row.failure == "the loss was not reached in 200 steps"
    assert "x fp32" not in row.cells
    assert _verdict([fp32, bf16, diverged], fp32, bf16) == "Not measured."


def test_rows_explain_missing_network_namespaces() -> None:
    fp32, bf16 = (
        System(name=name, flags=(), failure="a slow link needs root") for name in ("fp32", "bf16")
    )
    assert [row.failure for row in _rows([fp32, bf16], fp32, bf16)] == [
        "a slow link needs root"
    ] * 2
    assert _verdict([fp32, bf16], fp32, bf16) == "Not measured."
