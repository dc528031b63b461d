"""A worker that makes no progress reports the script's line, and what that line waits for."""

from __future__ import annotations

import threading

from shoal_worker.elastic.coordinator.coordinator_messages import progress_message
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.coordinator.script_lines import calls_of, script_line
from shoal_worker.metrics import WorkerMetrics

from tests.unit.worker_elastic.test_progress import Clock


def test_a_thread_without_a_line_of_the_script_has_no_position() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    assert thread.ident is not None
    assert script_line(calls_of(thread.ident)) == ""
    ended.set()
    thread.join()
    assert script_line(calls_of(thread.ident)) == ""


def test_heartbeats_have_the_position_once_there_was_no_progress_for_five_seconds() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    clock.now += 60
    assert meter.snapshot().script_line == ""  # the loop has not begun
    meter.entered()
    clock.now += 4.9
    assert meter.snapshot().script_line == ""
    clock.now += 0.2
    position = progress_message(meter.snapshot()).script_line
    assert "test_script_lines.py:" in position
    assert "in test_heartbeats_have_the_position" in position
    meter.entered()
    assert meter.snapshot().script_line == ""
